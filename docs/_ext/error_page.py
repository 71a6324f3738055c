"""The catalogue of errors, made from the registry of codes. The registry is plain text; this page makes links of what it names."""

import re

from equipoise.core.error_codes import families

CHAPTERS = {
    "1": "A parameter breaks its rule", "2": "Parts do not go together", "3": "Data cannot be used", "4": "A file or option is wrong",
    "5": "A run stops", "6": "Federations", "7": "Privacy", "8": "Models to hand out", "9": "Laws",
}  # fmt: skip
FOLDER = "../../"  # from the page to docs/
NAMED = {  # as causes and cures name a page → where it is, seen from docs/
    "the guide on your own data": "howto/data.md",
    "the guide on data of other libraries": "howto/data.md#data-of-other-libraries",
    "the guide on tables": "howto/tables.md",
    "the guide on comparing methods": "howto/compare.md",
    "the guide on tuning": "howto/tune.md",
    "the page on federations": "federation.md",
    "the page on operating a federation": "operate-federation.md",
    "the page on contracts and laws": "explanation/laws.md",
    "the page on Ray clusters": "scale.md",
    "The matrix of combinations": "reference/generated/combinations.md",
    "The reference of configuration files": "reference/generated/configuration.md",
    "the reference of commands": "reference/generated/commands.md",
    "The reference of the API": "reference/generated/api.md",
    "`examples/study.toml`": "../examples/study.toml",
    "`examples/tune.toml`": "../examples/tune.toml",
}
_NAME = re.compile("|".join(re.escape(name) for name in NAMED))


def linked(text: str) -> str:
    """The text with a link wherever it names a page or a file.

    >>> linked("See the guide on tuning.")
    'See [the guide on tuning](../../howto/tune.md).'
    """
    return _NAME.sub(lambda found: f"[{found.group()}]({FOLDER}{NAMED[found.group()]})", text)


def page() -> str:
    """The page."""
    lines = [
        "# Errors", "",
        "For everybody who meets an error. After this page you know what is usually wrong, and what to do.", "",
        "Every message of the library ends in a code such as `[EQ101]`. The message itself names the parameter, the rule and the",
        f"value. Below are the {len(families())} codes. Wording may change between versions; codes do not. `error.code` has the code",
        "in Python.", "",
    ]  # fmt: skip
    chapter = ""
    for code, family in families().items():
        if CHAPTERS[code[2]] != chapter:
            chapter = CHAPTERS[code[2]]
            lines += [f"## {chapter}", ""]
        where = "" if family.modules == ("*",) else f" in {', '.join(f'`{m}`' for m in family.modules if m != '*')}"
        lines += [f"({code.lower()})=", f"### {code}: {family.title}", "", f"*Raised as `{family.error}`{where}.*", "",
                  f"**Cause.** {linked(family.cause)}", "", f"**Cure.** {linked(family.cure)}", ""]  # fmt: skip
    return "\n".join(lines)
