"""Language models: the catalogue's methods on PyTorch and Hugging Face."""
