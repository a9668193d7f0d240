"""python -m ropecli; also what `accelerate launch -m ropecli` starts."""

from ropecli.cli.app import main

if __name__ == "__main__":
    main()
