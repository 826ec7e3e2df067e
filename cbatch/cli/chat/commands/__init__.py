"""Commands after a slash. Importing the package registers all of them, in the order of `/help`."""

from cbatch.cli.chat.commands import sessions, settings, files  # isort: skip  # the order in which they register

__all__ = ["files", "sessions", "settings"]
