"""Entry point of ``python -m punica.serve``."""

from punica.serve.cli import main

if __name__ == "__main__":
    main()
