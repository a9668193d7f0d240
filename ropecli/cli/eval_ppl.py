def command() -> None:
    pass
