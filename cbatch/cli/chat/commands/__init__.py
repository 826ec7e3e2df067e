"""What can be typed after a slash. Importing the package registers all commands, in the order of `/help`."""

from cbatch.cli.chat.commands import (  # isort: skip  # the order in which they register
    reply_commands,
    session_commands,
    settings_commands,
    saved_commands,
    file_commands,
    help_commands,
)

__all__ = [
    "file_commands",
    "help_commands",
    "reply_commands",
    "saved_commands",
    "session_commands",
    "settings_commands",
]
