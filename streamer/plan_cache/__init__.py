"""The plan cache: what a load's trace found, kept so that the next one need not run the model's loading code."""
