"""From demand to requests: which bytes, in how many reads. Pure arithmetic on byte positions."""
