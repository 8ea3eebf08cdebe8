"""YAML 1.2 text → plain data, and the line of every key and item.

Plain scalars follow the core schema of YAML 1.2: ``no`` and ``2026-01-01`` are text, whatever a ``%YAML`` directive or
a library's default says. What a policy has no use for is an error with its line: tags, several documents, merge keys,
aliases to a parent, and more than a hundred thousand values however they are spelled.
"""

import re
from dataclasses import dataclass, field

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

_CORE = "tag:yaml.org,2002:"

Step = str | int
Place = tuple[Step, ...]
Data = None | bool | int | float | str | list["Data"] | dict[str, "Data"]

MOST_VALUES = 100_000
"""A few aliases can spell billions of values; a fleet of 10,000 instances written out has 40,000."""
MOST_BYTES = 4_194_304
DEEPEST = 50

_NULL = re.compile(r"|~|null|Null|NULL")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INF = re.compile(r"([-+]?)\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")


@dataclass(frozen=True, slots=True)
class Wrong:
    """One thing wrong with the text itself; *line* counts from 1."""

    line: int | None
    place: Place
    sentence: str


@dataclass(slots=True)
class Parsed:
    """What a text says.

    ``data`` is ``None`` when what is wrong leaves nothing to judge by; keys that stand twice leave the first.
    """

    data: Data = None
    lines: dict[Place, int] = field(default_factory=dict)
    wrong: list[Wrong] = field(default_factory=list)

    def find(self, place: Place) -> Place:
        """Return *place* with each list item that is named by its value turned into its index."""
        at = self.data
        found: Place = ()
        for step in place:
            if isinstance(at, list) and isinstance(step, str) and step in at:
                step = at.index(step)  # noqa: PLW2901 - the step itself is what is translated
            found = (*found, step)
            at = _inside(at, step)
        return found

    def line(self, place: Place) -> int | None:
        """Return the line of the deepest part of *place* that is written down."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place)


def _inside(data: Data, step: Step) -> Data:
    match data, step:
        case dict(), str():
            return data.get(step)
        case list(), int() if 0 <= step < len(data):
            return data[step]
    return None


def parse(raw: bytes) -> Parsed:
    """Read one document; never raises."""
    parsed = Parsed()
    if len(raw) > MOST_BYTES:
        parsed.wrong.append(Wrong(None, (), f"the file is larger than {MOST_BYTES:,} bytes"))
        return parsed
    try:
        node = YAML(typ="rt", pure=True).compose(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        parsed.wrong.append(Wrong(raw[: error.start].count(b"\n") + 1, (), "the file is not UTF-8 text"))
    except RecursionError:
        parsed.wrong.append(Wrong(None, (), "the file is nested too deeply"))
    except YAMLError as error:
        parsed.wrong.append(_broken(error, raw))
    except ValueError:  # the library's own, for \\U00110000
        parsed.wrong.append(Wrong(None, (), "an escape (`\\U…`) that stands for no character"))
    else:
        if node is not None:
            reading = _Reading(parsed)
            data = reading.value(node, ())
            parsed.data = None if reading.partial else data
    return parsed


def _broken(error: YAMLError, raw: bytes) -> Wrong:
    """Say what the library found without its excerpt of the file: that may hold what nobody should see."""
    if isinstance(error, ReaderError):
        text = raw.decode("utf-8-sig")
        return Wrong(text[: error.position].count("\n") + 1, (), "a control character that YAML does not allow")
    if not isinstance(error, MarkedYAMLError):
        return Wrong(None, (), "the file is not YAML")
    mark = error.problem_mark or error.context_mark
    line = None if mark is None else mark.line + 1
    problem = " ".join((error.problem or error.context or "broken").split())
    if "'\\t'" in problem:
        return Wrong(line, (), "a tab; YAML is indented with spaces")
    if "another document" in problem:
        return Wrong(line, (), "a second document (`---`); a policy file holds one")
    return Wrong(line, (), f"the file is not YAML: {problem}")


class _Reading:
    """One walk over the nodes of one text."""

    def __init__(self, parsed: Parsed) -> None:
        self._parsed = parsed
        self._left = MOST_VALUES
        self.partial = False

    def value(self, node: Node, place: Place) -> Data:
        self._left -= 1
        self._parsed.lines.setdefault(place, node.start_mark.line + 1)
        if self._left < 0 or len(place) > DEEPEST:
            if not any("aliases" in wrong.sentence for wrong in self._parsed.wrong):
                self._wrong(node, place, "too many or too deeply nested values, counting what aliases repeat")
            return None
        match node:
            case MappingNode():
                return self._mapping(node, place)
            case SequenceNode():
                return self._sequence(node, place)
            case ScalarNode():
                return self._scalar(node, place)
            case _:
                raise TypeError(type(node).__name__)

    def _wrong(self, node: Node, place: Place, sentence: str) -> None:
        self.partial = True
        self._twice(node, place, sentence)

    def _twice(self, node: Node, place: Place, sentence: str) -> None:
        self._parsed.wrong.append(Wrong(node.start_mark.line + 1, place, sentence))

    def _mapping(self, node: MappingNode, place: Place) -> Data:
        self._tag(node, place, "map")
        found: dict[str, Data] = {}
        for key, value in node.value:
            name = key.value
            if not isinstance(key, ScalarNode):
                self._wrong(key, place, "a key must be plain text")
            elif name == "<<" and key.style is None:
                self._wrong(key, place, "merge keys (`<<`) are not supported; write the keys out")
            elif name in found:
                self._twice(key, (*place, name), f"the key stands twice, first on line {self._line(place, name)}")
            else:
                self._parsed.lines[*place, name] = key.start_mark.line + 1
                found[name] = self.value(value, (*place, name))
            if self._left < 0:
                break
        return found

    def _line(self, place: Place, name: str) -> int:
        return self._parsed.lines[*place, name]

    def _sequence(self, node: SequenceNode, place: Place) -> Data:
        self._tag(node, place, "seq")
        found: list[Data] = []
        for i, item in enumerate(node.value):
            found.append(self.value(item, (*place, i)))
            if self._left < 0:
                break
        return found

    def _scalar(self, node: ScalarNode, place: Place) -> Data:
        self._tag(node, place, "str", "int", "float", "bool", "null", "timestamp")
        text: str = node.value
        quoted = node.style is not None or node.tag == f"{_CORE}str"
        return text if quoted else plain(text)

    def _tag(self, node: Node, place: Place, *known: str) -> None:
        if node.tag not in {f"{_CORE}{name}" for name in known}:
            self._wrong(node, place, "tags (`!`) are not supported")


def plain(text: str) -> Data:
    """Return what an unquoted scalar stands for (YAML 1.2.2, section 10.3.2)."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if _INT.fullmatch(text) and len(text) < 1000:
        return int(text)
    if _BASED.fullmatch(text) and len(text) < 1000:
        return int(text[2:], 8 if text[1] == "o" else 16)
    if _FLOAT.fullmatch(text):
        return float(text)
    if found := _INF.fullmatch(text):
        return float(f"{found[1]}inf")
    return float("nan") if _NAN.fullmatch(text) else text
