"""What can be typed after a slash. Importing the package registers all commands, in the order of `/help`."""

from cbatch.cli.chat.commands import replies, sessions, settings, files  # isort: skip  # the order in which they register

__all__ = ["files", "replies", "sessions", "settings"]
