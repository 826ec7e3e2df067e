"""Damages model folders and files of every format at random, and runs the whole command on each.

A run ends with one sentence and exit code 2, or gives every row its outcome. It never hangs, never prints a traceback,
a panic or a control character, and takes less than a gibibyte. `kinds` says what is damaged; `runs` starts the command
in a process with limits; `judge` holds the rules.
"""
