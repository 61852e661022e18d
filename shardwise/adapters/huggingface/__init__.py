"""Models of the transformers library: `model.name = "hf:FOLDER"`, or `"hf:TYPE"` with a config below `[model.args]`."""
