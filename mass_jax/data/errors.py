"""The one error of the data package."""


class DataError(ValueError):
    """Data that is missing, damaged or not what it claims to be.

    The message is one line that names the file and the fix; commands print it
    and exit with code 2.
    """
