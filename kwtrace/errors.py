"""The exceptions of kwtrace: one family, one sentence form."""


class KwtraceError(Exception):
    """Base of everything that kwtrace raises on purpose."""


class RuleError(KwtraceError):
    """A rule is declared wrongly: names the rule and the parameter."""


class TraceError(KwtraceError):
    """A variant can't be traced or proved: names the rule and the variant."""


class ConflictError(KwtraceError):
    """Two variants contradict each other: names both."""


class StaleError(KwtraceError):
    """A generated package doesn't belong to the rules that are loaded."""


class LoadError(KwtraceError):
    """A generated package or a rule module can't be loaded."""
