"""The catalogue of errors, made from the registry of codes."""

from equipoise.core.error_codes import families

CHAPTERS = {
    "1": "A parameter breaks its rule", "2": "Parts do not go together", "3": "Data cannot be used", "4": "A file or option is wrong",
    "5": "A run stops", "6": "Federations", "7": "Privacy", "8": "Models to hand out", "9": "Laws",
}  # fmt: skip


def page() -> str:
    """The page."""
    lines = [
        "# Errors", "",
        "For everybody who meets an error. After this page you know what is usually wrong, and what to do.", "",
        "Every message of the library ends in a code such as `[EQ101]`. Wording may change between versions; codes do not.",
        "`error.code` has the code in Python.", "",
    ]  # fmt: skip
    chapter = ""
    for code, family in families().items():
        if CHAPTERS[code[2]] != chapter:
            chapter = CHAPTERS[code[2]]
            lines += [f"## {chapter}", ""]
        lines += [f"({code.lower()})=", f"### {code}: {family.title}", "", f"*Raised as `{family.error}`.*", "",
                  f"**Cause.** {family.cause}", "", f"**Cure.** {family.cure}", ""]  # fmt: skip
    return "\n".join(lines)
