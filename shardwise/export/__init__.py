"""What leaves with a model: its card, proof and data profile; and whether new data has drifted from that profile."""
