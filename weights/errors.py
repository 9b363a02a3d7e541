"""The one error of this package, for what a user can mend; programming mistakes raise what Python raises."""


class CheckpointError(Exception):
    """A checkpoint, or what it should be made from, is refused. The text is a sentence that names the file and the reason.

    Unprintable characters of hostile names are escaped and the text is bounded, so that it may go into a log as it is.
    """

    def __init__(self, text: str) -> None:
        shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:1000])
        super().__init__(shown)
