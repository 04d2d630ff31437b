"""Files of a model, from a local folder or the Hugging Face Hub."""
