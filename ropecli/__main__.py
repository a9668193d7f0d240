"""Entry point of `python -m ropecli` and `accelerate launch -m ropecli`."""

from ropecli.cli.app import main

if __name__ == "__main__":
    main()
