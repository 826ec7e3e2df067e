"""What can be typed after a slash. Importing the package registers all commands."""

from cbatch.cli.chat.commands import file_commands, session_commands

__all__ = ["file_commands", "session_commands"]
