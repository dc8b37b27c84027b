"""Entry point of ``python -m punica.serve``."""

PACKAGES = {"fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client"}


def run() -> None:
    """Start the server; exit with the installation command where the extra ``serve`` is missing."""
    try:
        from punica.serve.cli import main
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        raise SystemExit(f"punica.serve needs {error.name}: pip install 'punica[serve]'") from None
    main()


if __name__ == "__main__":
    run()
