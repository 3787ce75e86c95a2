"""The site of docs/: no link of README.md, CONTRIBUTING.md or docs/ is dead, and generated pages name what there is."""

import ast
import importlib.util
import re
import sys

import pytest

from hvdtrain.core import ROOT

TREE = ROOT.parent
DOCS = TREE / "docs"
PAGES = sorted([*TREE.glob("*.md"), *DOCS.rglob("*.md")])
FENCE = re.compile(r"^ *```.*?^ *```", re.M | re.S)


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def links(text):
    """Targets of the links and pictures of a page, outside of code."""
    text = re.sub(r"`[^`\n]+`", "code", FENCE.sub("", text))
    return re.findall(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)", text) + re.findall(r"<(https?://[^>\s]+)>", text)


def anchors(text):
    """Anchors of a page's headings as GitHub and the site make them."""
    found = set()
    for title in re.findall(r"^#+ +(.+?) *#*$", FENCE.sub("", text), re.M):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        found.add(slug if slug not in found else f"{slug}-1")
    return found | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))


def test_no_internal_link_is_dead(hooks):
    dead, texts = [], {path: path.read_text(encoding="utf-8") for path in PAGES}
    for path, text in texts.items():
        for link in links(text):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            made = target.is_relative_to(DOCS) and target.relative_to(DOCS).as_posix() in hooks.MADE
            if not made and (not target.exists() or anchor and anchor not in anchors(texts[target])):
                dead.append(f"{path.relative_to(TREE)}: {link}")
            if made and path.parent == TREE:
                dead.append(f"{path.relative_to(TREE)}: {link} is made at build, and read on GitHub")
    assert not dead, "\n".join(dead)


def test_external_links_are_listed():
    found = sorted({link for path in PAGES if path.name != "CHANGELOG.md"
                    for link in links(path.read_text(encoding="utf-8")) if link.startswith("http")})
    listed = (DOCS / "external-links.txt").read_text(encoding="utf-8").split()
    assert listed == found, "run python docs/generate.py"


@pytest.mark.parametrize(("text", "expected"), [
    ("[a](docs/how-to/data.md#x)", "[a](how-to/data.md#x)"), ("[a](CONTRIBUTING.md)", "[a](contributing.md)"),
    ("[`a`](LICENSE)", "`a`"), ("[a](https://x.org/b) `[c](LICENSE)`", "[a](https://x.org/b) `[c](LICENSE)`"),
    ("![p](docs/reference/p.png)", "![p](reference/p.png)"), ("```\n[c](LICENSE)\n```", "```\n[c](LICENSE)\n```"),
    ("[![p](docs/p.png)](docs/a.md)", "[![p](p.png)](a.md)")])
def test_links_of_the_readme_fit_the_site(hooks, text, expected):
    assert hooks.moved(text, "README.md", "index.md") == expected


def test_every_page_is_in_the_navigation_once(hooks):
    pages = [*hooks.COPIED, *hooks.MADE, *(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))]
    named = [page for section in hooks.navigation(pages) for names in section.values()
             for page in ([names] if isinstance(names, str) else names)]
    assert sorted(named) == sorted(pages)


def test_every_exit_status_is_documented(hooks):
    made = set()
    for path in ROOT.rglob("*.py"):
        for names, values in re.findall(r"^(EXIT_\w+(?:, EXIT_\w+)*) = ([\d, ]+)$", path.read_text("utf-8"), re.M):
            made |= {int(value) for value in values.split(",")}
    assert made == set(hooks.pages.STATUSES) and len(made) > 5


def test_every_environment_variable_is_documented(hooks):
    """Variables that are read by name; those of launchers, of MPI and of the shell tell a process its place."""
    documented = [name.replace("*", ".*") for names in hooks.pages.VARIABLES.values() for name in names]
    elsewhere = ("OMPI_.*|PMI.*|MPI_.*|SLURM_.*|PBS_.*|LSB_.*|"
                 "HOROVOD_(GLOO|RANK|SIZE|LOCAL|WITH|BUILD|CONTROLLER|CPU|HOSTNAME).*|"
                 "PATH|HOME|LANG|LC_.*|PYTHONPATH|LD_LIBRARY_PATH|TMPDIR|container|CMAKE_.*|HYDRA_.*|OPAL_PREFIX|"
                 "CUDA_(HOME|PATH)|LAST_OF_THE_ENVIRONMENT|TF_CPP_MAX_VLOG_LEVEL")
    missing = {f"{name} in {path.relative_to(TREE)}" for path in ROOT.rglob("*.py")
               for name in read(ast.parse(path.read_text("utf-8")))
               if not re.fullmatch("|".join([elsewhere, *documented]), name)}
    assert not missing


def read(tree):
    """Names of environment variables in the source: of subscripts and calls of an environ or env, and constants."""
    constants = {target.id: node.value.value for node in ast.walk(tree) if isinstance(node, ast.Assign)
                 for target in node.targets if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            owner, key = node.value, node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            owner, key = node.func.value, node.args[0]
        else:
            continue
        name = constants.get(key.id) if isinstance(key, ast.Name) else getattr(key, "value", None)
        if isinstance(name, str) and re.search(r"\b(environ|env)$", ast.unparse(owner)):
            yield name
