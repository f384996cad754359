"""`python -m thinwire`, as torchrun starts it."""

from .cli import main

if __name__ == "__main__":
    main()
