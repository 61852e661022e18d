"""Evaluation: perplexity and tasks on a run in any layout or on a Hugging Face folder; the interface of lm-eval."""
