"""Tests, their reference implementations, and the script that runs on a GPU."""
