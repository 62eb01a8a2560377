"""Train a drafter: ``python train.py --help``."""

from distill.train.main import main

if __name__ == "__main__":
    raise SystemExit(main())
