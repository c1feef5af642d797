"""Inside `transformers`: a decoding loop for `generate`, and a candidate generator for its assisted generation."""
