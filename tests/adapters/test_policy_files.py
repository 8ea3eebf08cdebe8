"""Broken policies: each says its file, its line and a sentence."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from extproc.adapters import policy_files
from extproc.adapters.policy_files import PolicyError

SHIPPED = Path(__file__).parents[2] / "policies"

FLEET = """\
home: a
models:
  m: {aliases: [em]}
sites:
  - name: a
    jurisdictions: [eu]
    instances:
      - models: [m]
        static:
          - {name: a-0, address: "10.0.0.1:80"}
          - {name: a-1, address: "10.0.0.2:80"}
  - name: b
    jurisdictions: [us]
    rtt_ms: 80
    instances:
      - models: [m]
        static:
          - {name: b-0, address: "10.0.1.1:80"}
          - {name: b-1, address: "[::1]:80"}
"""
PROFILE = "source: test\na_ms: 1\nc_ms: 1\nd_ms: 1\ne_ms: 1\n"

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a good folder with some files replaced; ``None`` leaves one out."""

    def folder(files: Mapping[str, str | None] | None = None) -> Path:
        base: dict[str, str | None] = {"fleet.yaml": FLEET, "profiles/default.yaml": PROFILE}
        for name, text in (base | dict(files or {})).items():
            if text is not None:
                (tmp_path / name).parent.mkdir(exist_ok=True)
                (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path

    return folder


def told(folder: Path) -> list[tuple[str, int | None, str, str]]:
    found = policy_files.problems(folder)
    return [(str(one.file.relative_to(folder)), one.line, one.where, one.message) for one in found]


def warned(folder: Path) -> list[tuple[str, int | None, str, str]]:
    found = policy_files.examine(folder)
    assert not found.problems
    return [(str(one.file.relative_to(folder)), one.line, one.where, one.message) for one in found.warnings]


def test_the_shipped_policy_has_neither_problems_nor_warnings() -> None:
    found = policy_files.examine(SHIPPED)
    assert (found.problems, found.warnings) == ((), ())


def test_the_shipped_policy_means_what_its_comments_say() -> None:
    policy = policy_files.load(SHIPPED)
    assert [len([one for g in site.instances for one in g.static or ()]) for site in policy.fleet.sites] == [3, 3]
    assert policy.tenants.by_key[hashlib.sha256(b"sk-demo-acme").hexdigest()] == "acme"
    assert policy.tenants.by_key[hashlib.sha256(b"sk-demo-globex").hexdigest()] == "globex"
    assert policy.tenants.by_key[hashlib.sha256(b"sk-demo-batchworks").hexdigest()] == "batchworks"
    assert policy.fleet.canonical["Qwen/Qwen3-32B"] == "qwen3-32b"


def test_only_fleet_yaml_is_required(write: Write) -> None:
    policy = policy_files.load(write())
    assert [one.name for one in policy.slomax.classes] == ["standard"]
    assert policy.tenants.unknown == "default"
    assert policy.fleet.sites[1].instances[0].static is not None


def test_a_missing_fleet_is_a_problem_without_a_line(write: Write) -> None:
    assert told(write({"fleet.yaml": None})) == [("fleet.yaml", None, "", "the file is missing")]


def test_a_missing_folder_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="there is no such folder"):
        policy_files.load(tmp_path / "nowhere")


def test_a_file_that_cannot_be_read_is_a_problem(write: Write) -> None:
    folder = write()
    (folder / "slomax.yaml").mkdir()
    (name, line, _, message) = told(folder)[0]
    assert (name, line) == ("slomax.yaml", None)
    assert message == "the file cannot be read: Is a directory"


def test_an_empty_file_says_what_its_defaults_say(write: Write) -> None:
    assert policy_files.load(write({"gateway.yaml": "# nothing\n"})).gateway.steer_percent == 100


def test_words_that_old_yaml_took_for_truth_values_stay_text(write: Write) -> None:
    text = FLEET.replace("home: a", "home: no").replace("- name: a\n", "- name: no\n")
    policy = policy_files.load(write({"fleet.yaml": "%YAML 1.1\n---\n" + text}))
    assert policy.fleet.home == "no"
    assert policy.fleet.sites[0].envoy_cluster == "site-no"


BROKEN = [
    # file, text, line, where, sentence
    ("gateway.yaml", "debug: false\ntrust:\n\tapi_keys: true\n", 3, "", "a tab; YAML is indented with spaces"),
    ("gateway.yaml", "debug: true\n\ndebug: false\n", 3, "debug", "the key stands twice, first on line 1"),
    ("gateway.yaml", "debug: true\n---\ndebug: true\n", 2, "", "a second document (`---`); a policy file holds one"),
    ("gateway.yaml", "debug: [\n", 2, "", "the file is not YAML: expected the node content, but found '<stream end>'"),
    ("gateway.yaml", "a: 1\nb: \x07\n", 2, "", "a control character that YAML does not allow"),
    ("gateway.yaml", "debug: !!python/name:os.system x\n", 1, "debug", "tags (`!`) are not supported"),
    ("gateway.yaml", "<<: {debug: true}\n", 1, "", "merge keys (`<<`) are not supported; write the keys out"),
    ("gateway.yaml", "? [a]\n: 1\n", 1, "", "a key must be plain text"),
    ("gateway.yaml", "- debug\n", 1, "", "must be a mapping of keys"),
    ("gateway.yaml", "\nsteer_precent: 5\n", 2, "steer_precent", "unknown key; did you mean steer_percent?"),
    (
        "fleetmind.yaml",
        "zzz: 5\n",
        1,
        "zzz",
        "unknown key; known here: margin_ms, network_weight",
    ),
    ("gateway.yaml", "debug: yes\n", 1, "debug", "must be true or false"),
    ("gateway.yaml", "steer_percent: 101\n", 1, "steer_percent", "must be at most 100, not 101"),
    ("gateway.yaml", "max_body_bytes: 12\n", 1, "max_body_bytes", "must be at least 1,024, not 12"),
    ("gateway.yaml", "max_body_bytes: '4096'\n", 1, "max_body_bytes", "must be a whole number"),
    ("gateway.yaml", "max_body_bytes: 1e4\n", 1, "max_body_bytes", "must be a whole number"),
    ("gateway.yaml", "trust:\n", 1, "trust", "has no value; write one or remove the key"),
    ("gateway.yaml", "trust:\n  jwt:\n    path: []\n", 3, "trust.jwt.path", "needs at least 1 entry"),
    (
        "gateway.yaml",
        "trust:\n  tenant_header: X-TokenFleet-Tenant\n",
        2,
        "trust.tenant_header",
        "Envoy removes headers of this prefix before they are read; choose another name",
    ),
    ("gateway.yaml", "trust: {tenant_header: 'a b'}\n", 1, "trust.tenant_header", "must be the name of an HTTP header"),
    ("gateway.yaml", "other_paths: pas\n", 1, "other_paths", "must be one of pass, refuse; did you mean pass?"),
    ("tokenpilot.yaml", "weights:\n  queue: .inf\n", 2, "weights.queue", "must be a finite number"),
    ("tokenpilot.yaml", "weights:\n  queue: .nan\n", 2, "weights.queue", "must be a finite number"),
    ("tokenpilot.yaml", "hosts: true\n", 1, "hosts", "must be a whole number"),
    ("tokenpilot.yaml", "hosts: 2.5\n", 1, "hosts", "must be a whole number"),
    ("tokenpilot.yaml", "index_ttl_s: 0\n", 1, "index_ttl_s", "must be more than 0, not 0"),
    ("slomax.yaml", "classes:\n  - ttft_ms: 5\n", 2, "classes[0].name", None),
    ("slomax.yaml", "classes: []\n", 1, "classes", "needs at least 1 entry"),
    ("slomax.yaml", "classes:\n  - {name: a}\n  - {name: a}\n", 3, "classes[1].name", "class a is named twice"),
    (
        "slomax.yaml",
        "classes:\n  - name: a\n    when:\n      stream: true\n",
        3,
        "classes[0].when",
        "the last class must have no conditions, so that every request has a class",
    ),
    (
        "slomax.yaml",
        "classes:\n  - name: a\n    when:\n      tasks:\n        - chat\n        - embeddings\n  - name: b\n",
        6,
        "classes[0].when.tasks[1]",
        "must be one of chat, completion, embedding; did you mean embedding?",
    ),
    ("tenants.yaml", "tenants: {x: {sites: a}}\n", 1, "tenants.x.sites", "must be a list"),
    ("tenants.yaml", "tenants:\n  x: {tier: 3}\n", 2, "tenants.x.tier", "must be text; put it in quotes"),
    (
        "tenants.yaml",
        "tenants:\n  a b: {}\n",
        2,
        'tenants."a b"',
        "must be letters, digits and . _ : / @ -, beginning with a letter or digit",
    ),
    (
        "tenants.yaml",
        "tenants:\n  x:\n    jurisdictions: [EU]\n",
        3,
        "tenants.x.jurisdictions[0]",
        "must be lower-case letters, digits and -, such as eu or de",
    ),
    (
        "tenants.yaml",
        "tenants:\n  x:\n    denied_sites:\n      - a\n      - bb\n",
        5,
        "tenants.x.denied_sites[1]",
        "there is no site bb; fleet.yaml has a, b",
    ),
    ("tenants.yaml", "default: {models: [q]}\n", 1, "default.models[0]", "q is no model; fleet.yaml has m"),
    (
        "tenants.yaml",
        "default: {models: [em]}\n",
        1,
        "default.models[0]",
        "em is an alias; write m, the model's own name",
    ),
    (
        "tenants.yaml",
        f"tenants:\n  x: {{api_key_sha256: [{'f' * 64}]}}\n  y: {{api_key_sha256: [{'f' * 64}]}}\n",
        3,
        "tenants.y.api_key_sha256",
        "an API key of this tenant is another tenant's too",
    ),
    ("profiles/default.yaml", PROFILE.replace("e_ms: 1", "e_ms: 0"), 5, "e_ms", "must be more than 0, not 0"),
    (
        "profiles/default.yaml",
        "source: test\na_ms: 1\nd_ms: 1\ne_ms: 1\n",
        1,
        "c_ms",
        "the key is missing: Added per running request.",
    ),
]


@pytest.mark.parametrize(("name", "text", "line", "where", "sentence"), BROKEN)
def test_a_broken_file_is_told_with_line_place_and_sentence(
    write: Write, name: str, text: str, line: int, where: str, sentence: str | None
) -> None:
    found = told(write({name: text}))
    assert len(found) == 1
    assert found[0][:3] == (name, line, where)
    assert sentence is None or found[0][3] == sentence


FLEETS = [
    ("home: a", "home: c", 1, "home", "home c is none of the sites: a, b"),
    ("name: b\n", "name: a\n", 12, "sites[1].name", "site a is named twice"),
    ("    rtt_ms: 80", "    rtt_m: 80", 14, "sites[1].rtt_m", "unknown key; did you mean rtt_ms?"),
    ("    rtt_ms: 80", "    rtt_ms: -1", 14, "sites[1].rtt_ms", "must be at least 0, not -1"),
    ("    rtt_ms: 80", "    cluster: site-a", 14, "sites[1].cluster", "two sites use the Envoy cluster site-a"),
    (
        "    rtt_ms: 80",
        "    cluster: tokenfleet-ext-proc",
        14,
        "sites[1].cluster",
        "tokenfleet-ext-proc is the cluster of our own servers",
    ),
    (
        "    rtt_ms: 80",
        "    cluster: ../../etc/x",
        14,
        "sites[1].cluster",
        "must be letters, digits and . _ -, beginning with a letter or digit",
    ),
    ("name: b-0", "name: a-0", 18, "sites[1].instances[0].static[0].name", "instance name a-0 is listed twice"),
    (
        "10.0.1.1:80",
        "10.0.0.2:80",
        18,
        "sites[1].instances[0].static[0].address",
        "address 10.0.0.2:80 is listed twice",
    ),
    (
        "10.0.1.1:80",
        "10.0.1.256:80",
        18,
        "sites[1].instances[0].static[0].address",
        "must be `ip:port`, an IPv6 address in brackets; for a host name use `dns`",
    ),
    (
        "[::1]:80",
        "::1:80",
        19,
        "sites[1].instances[0].static[1].address",
        "must be `ip:port`, an IPv6 address in brackets; for a host name use `dns`",
    ),
    (
        "10.0.1.1:80",
        "10.0.1.1:65536",
        18,
        "sites[1].instances[0].static[0].address",
        "the port must be a number from 1 to 65535",
    ),
    (
        "aliases: [em]",
        "aliases: [m]",
        3,
        "models.m.aliases[0]",
        "m already names a model; a name or alias may stand once",
    ),
    (
        "      - models: [m]\n        static:\n          - {name: b-0",
        "      - models: [m,\n           n]\n        static:\n          - {name: b-0",
        17,
        "sites[1].instances[0].models[1]",
        "model n is not listed in models: m",
    ),
    (
        "      - models: [m]\n        static:\n          - {name: b-0",
        "      - models: [m]\n        dns: x:1\n        static:\n          - {name: b-0",
        16,
        "sites[1].instances[0]",
        "give exactly one of static, dns, file; found static, dns",
    ),
    (
        "      - models: [m]\n        static:\n          - {name: b-0",
        "      - models: [m]\n        profile: h100\n        static:\n          - {name: b-0",
        17,
        "sites[1].instances[0].profile",
        "there is no profile h100; profiles/ has default",
    ),
]


@pytest.mark.parametrize(("good", "bad", "line", "where", "sentence"), FLEETS)
def test_a_broken_fleet_is_told_at_its_line(
    write: Write, good: str, bad: str, line: int, where: str, sentence: str
) -> None:
    assert FLEET.count(good) == 1
    assert told(write({"fleet.yaml": FLEET.replace(good, bad)})) == [("fleet.yaml", line, where, sentence)]


def test_every_problem_of_every_file_is_told_at_once(write: Write) -> None:
    fleet = FLEET.replace("home: a", "home: c").replace("10.0.1.1:80", "10.0.0.1:80")
    found = told(
        write(
            {
                "fleet.yaml": fleet,
                "gateway.yaml": "debug: 1\nsteer_percent: -1\n",
                "tokenpilot.yaml": "hosts: 0\nhosts: 1\nnear_equal: 2\n",
                "slomax.yaml": "classes: [\n",
            }
        )
    )
    assert [one[:3] for one in found] == [
        ("fleet.yaml", 1, "home"),
        ("fleet.yaml", 18, "sites[1].instances[0].static[0].address"),
        ("gateway.yaml", 1, "debug"),
        ("gateway.yaml", 2, "steer_percent"),
        ("slomax.yaml", 2, ""),
        ("tokenpilot.yaml", 1, "hosts"),
        ("tokenpilot.yaml", 2, "hosts"),
        ("tokenpilot.yaml", 3, "near_equal"),
    ]


def test_files_are_compared_though_a_third_one_is_broken(write: Write) -> None:
    found = told(write({"tenants.yaml": "default: {sites: [x]}\n", "gateway.yaml": "debug: 1\n"}))
    assert [one[:3] for one in found] == [("gateway.yaml", 1, "debug"), ("tenants.yaml", 1, "default.sites[0]")]


def test_a_secret_in_the_wrong_place_is_never_repeated(write: Write) -> None:
    secret = "sk-live-0123456789"
    texts = [
        f"tenants:\n  x:\n    api_key_sha256: [{secret}]\n    tier: '{secret} '\n    api_key: {secret}\n",
        f"default: {secret}\n",
        f"unknown: {secret}\n",
        f"tenants:\n  x: [{secret}\n  y: {secret}\n",
        f"tenants: {{x: {{sites: {secret}}}}}\nunknown: [{secret}]\n",
    ]
    for text in texts:
        found = policy_files.problems(write({"tenants.yaml": text}))
        assert found
        assert secret not in str(PolicyError(found))


def test_aliases_that_spell_billions_of_values_are_refused(write: Write) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    (problem,) = told(write({"gateway.yaml": "\n".join(lines)}))
    assert problem[3] == "too many or too deeply nested values, counting what aliases repeat"


@pytest.mark.parametrize("text", ["a: &a [*a]\n", "a: " + "[" * 60 + "]" * 60, "[" * 3_000])
def test_endless_nesting_is_refused(write: Write, text: str) -> None:
    (problem,) = told(write({"gateway.yaml": text}))
    assert "nested" in problem[3]


def test_a_huge_file_is_refused_unread(write: Write) -> None:
    assert told(write({"gateway.yaml": "#" * 5_000_000}))[0][3] == "the file is larger than 4,194,304 bytes"


def test_text_that_is_not_utf_8_is_told_with_its_line(write: Write) -> None:
    folder = write()
    (folder / "gateway.yaml").write_bytes(b"# ok\n# \xff\n")
    assert told(folder) == [("gateway.yaml", 2, "", "the file is not UTF-8 text")]


def test_an_alias_is_read_as_what_it_repeats(write: Write) -> None:
    policy = policy_files.load(write({"tenants.yaml": "default: &d {denied_sites: [b]}\ntenants: {x: *d}\n"}))
    assert policy.tenants.of("x").denied_sites == {"b"}


@pytest.mark.parametrize("name", ["tennants.yaml", "tenants.yml"])
def test_a_misspelled_file_is_a_problem_since_its_rules_would_bind_nobody(write: Write, name: str) -> None:
    assert told(write({name: "{}"})) == [(name, None, "", "unknown file; did you mean tenants.yaml?")]


def test_the_line_of_a_problem_in_a_watched_list_is_in_that_list(write: Write) -> None:
    fleet = FLEET[: FLEET.rindex("        static:")] + "        file: instances.yaml\n"
    folder = write({"fleet.yaml": fleet, "instances.yaml": "- {name: x, address: '1.2.3.4:5'}\n- {nam: y}\n"})
    assert [one[:3] for one in told(folder)] == [
        ("instances.yaml", 2, "[1].name"),
        ("instances.yaml", 2, "[1].address"),
        ("instances.yaml", 2, "[1].nam"),
    ]


def test_a_watched_list_is_read_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- {name: x, address: '1.2.3.4:5', draining: true}\n")
    (one,) = policy_files.instances(path)
    assert (one.name, one.draining) == ("x", True)
    path.write_text("")
    assert policy_files.instances(path) == ()
    path.write_text("- {name: x}\n")
    with pytest.raises(PolicyError, match=r"list\.yaml:1: \[0\]\.address: the key is missing"):
        policy_files.instances(path)


def test_a_problem_prints_as_editors_read_it(write: Write) -> None:
    (problem,) = policy_files.problems(write({"gateway.yaml": "debug: 1\n"}))
    assert str(problem).endswith("gateway.yaml:1: debug: must be true or false")


WARNED = [
    (
        "tenants.yaml",
        "tenants:\n  x:\n    jurisdictions: [de]\n",
        3,
        "tenants.x.jurisdictions",
        "no site that serves m is lawful for this tenant",
    ),
    (
        "tenants.yaml",
        "default:\n  jurisdictions: [eu]\n  denied_sites: [a]\n",
        2,
        "default.jurisdictions",
        "no site that serves m is lawful for this tenant",
    ),
    (
        "slomax.yaml",
        "classes:\n  - name: a\n  - name: b\n",
        3,
        "classes[1]",
        "no request reaches this class by rule: a, before it, has no conditions",
    ),
    (
        "slomax.yaml",
        "classes:\n  - {name: a, when: {tiers: [gold]}}\n  - {name: b}\n",
        2,
        "classes[0].when.tiers[0]",
        "no tenant has the tier gold",
    ),
    (
        "slomax.yaml",
        "classes:\n  - {name: a, when: {min_prompt_tokens: 5, max_prompt_tokens: 4}}\n  - {name: b}\n",
        2,
        "classes[0].when.min_prompt_tokens",
        "no request is in this class: above max_prompt_tokens",
    ),
    (
        "fleet.yaml",
        FLEET.replace('          - {name: b-1, address: "[::1]:80"}\n', ""),
        15,
        "sites[1].instances",
        "the only instance here: a failed request has no second",
    ),
    ("fleet.yaml", FLEET.replace("[em]}", "[em]}\n  n: {}"), 4, "models.n", "no site serves this model"),
    (
        "fleet.yaml",
        FLEET.replace('0.2:80"', '0.2:80", models: [n]').replace("[em]}", "[em]}\n  n: {}"),
        4,
        "models.n",
        "one instance in all serves this: a failed request has no second",
    ),
    (
        "fleet.yaml",
        FLEET + "telemetry:\n  lost_after_ms: 100\n",
        21,
        "telemetry.lost_after_ms",
        "not longer than scrape_ms: instances are lost between readings",
    ),
]


@pytest.mark.parametrize(("name", "text", "line", "where", "sentence"), WARNED)
def test_what_is_lawful_and_not_meant_is_a_warning(
    write: Write, name: str, text: str, line: int, where: str, sentence: str
) -> None:
    assert warned(write({name: text})) == [(name, line, where, sentence)]


def test_a_tenant_with_one_lawful_site_for_each_model_is_not_warned_of(write: Write) -> None:
    assert warned(write({"tenants.yaml": "tenants:\n  x: {jurisdictions: [us], models: [m]}\n"})) == []


def test_a_watched_list_that_is_not_there_yet_is_a_warning(write: Write) -> None:
    fleet = FLEET[: FLEET.rindex("        static:")] + "        file: instances.yaml\n"
    (warning,) = warned(write({"fleet.yaml": fleet}))
    assert warning[:3] == ("fleet.yaml", 17, "sites[1].instances[0].file")
