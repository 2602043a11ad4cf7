"""The model that proves the service: a V4.1-shaped decoder with random weights; only commands and tests import it."""
