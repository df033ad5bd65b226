"""Which tile sizes serve which call: tables with provenance, and what is legal at all."""
