"""Token ids to text: detokenizer, stop strings, deltas."""
