"""`recast` and `python -m recast_lightning`."""

from recast_lightning.cli import main

if __name__ == "__main__":
    main()
