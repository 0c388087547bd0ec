"""The command line: one file per group of commands, heavy imports inside the commands, so that --help is fast."""
