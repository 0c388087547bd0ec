"""``python -m overspill``: the command without its entry point, for checkouts that are not installed."""

from overspill.cli.main import main

main()
