"""Text to ids and back: which characters each id spells. What several middlewares need of a tokenizer."""
