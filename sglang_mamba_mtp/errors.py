"""The one error this plugin raises on purpose: its text is for the operator and says what to do."""


class MtpError(RuntimeError):
    """The plugin refuses to serve. The message names what was found, what was expected and the way out."""
