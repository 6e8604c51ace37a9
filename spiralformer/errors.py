"""Mistakes of the user, as opposed to bugs."""


class UserError(Exception):
    """Bad input: a config, a checkpoint, a data file, a request.

    The message is one or two lines that name the field or file, the value and the remedy. The
    command line prints it and exits with status 2; a traceback is for bugs.
    """


def first_line(error: BaseException) -> str:
    """What a library's error says, for a message of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shown(value: object, longest: int = 60) -> str:
    """A value for a message, whatever it is: never longer than this."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or of lists in lists
        return f"a {type(value).__name__} too large to be printed"
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text):,} characters)"
