"""Replacing a serving model's weights, all ranks or none: what must be so before, and who has to agree."""
