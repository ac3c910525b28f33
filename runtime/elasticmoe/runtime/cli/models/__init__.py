"""The test models that `elasticmoe make-model` writes: their shapes, sample text, tokenizer and weights."""
