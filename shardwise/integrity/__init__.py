"""Non-finite numbers, loss spikes and silent corruption: how they are found and what is done about them."""
