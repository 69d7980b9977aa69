"""Triptych beside the engines that a user could pick instead: same model, same prompts, in turn, several rounds."""
