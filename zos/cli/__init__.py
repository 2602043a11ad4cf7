"""zos.cli: the commands of `zos`, one file each; the library never imports them."""


class InputError(ValueError):
    """What the user gave cannot be used: the command prints this one line and ends with exit code 2."""
