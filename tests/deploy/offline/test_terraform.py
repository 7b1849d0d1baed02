"""The modules, held against the providers' schemas; their own tests; and mistakes that must be found."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.bindings import read_schema
from tests.deploy.policies import POLICY_ARGUMENTS, golden
from tests.deploy.terraform import MODULES, ROOT, Terraform

TESTED = ("modules/reader-policy", "aws", "gcp")


def test_format(terraform: Terraform) -> None:
    done = terraform.run(".", "fmt", "-check", "-recursive", "-diff")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("module", MODULES)
def test_validate(terraform: Terraform, module: str) -> None:
    done = terraform.run(module, "validate")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("module", TESTED)
def test_own_tests(terraform: Terraform, module: str) -> None:
    done = terraform.run(module, "test")
    assert done.returncode == 0, done.stdout
    # `terraform test` that finds no tests succeeds as well.
    passed = re.search(r"Success! (\d+) passed, 0 failed\.", done.stdout)
    assert passed is not None, done.stdout
    written = sum(path.read_text().count("\nrun ") for path in (terraform.tree / module / "tests").glob("*.tftest.hcl"))
    assert int(passed[1]) == written > 0


@pytest.mark.parametrize("module", [name for name in MODULES if "/" not in name or name.startswith("modules/")])
def test_variables_and_outputs_are_described(terraform: Terraform, module: str) -> None:
    for file in ("variables.tf", "outputs.tf"):
        text = (terraform.tree / module / file).read_text()
        assert text.count("\n  description ") == len(re.findall(r'^(?:variable|output) "', text, re.MULTILINE)) > 0
    assert (terraform.tree / module / "README.md").is_file()


#: Module, what is right there (a pattern), what is written instead, and what must then be said.
MISTAKES = {
    "misspelt argument": ("aws", r"block_public_policy ", "block_public_polcy ", 'Did you mean "block_public_policy"?'),
    "missing argument": ("aws", r"  namespace .*each.*\n", "", '"namespace" is required'),
    "missing block": (
        "aws",
        r"  versioning_configuration \{[^}]*\}\n",
        "",
        'At least 1 "versioning_configuration" blocks',
    ),
    "second block": ("gcp", r"(  versioning \{[^}]*\}\n)", r"\1\1", 'No more than 1 "versioning" blocks are allowed'),
    "unknown block": ("gcp", r"  versioning \{", "  versionings {", 'Blocks of type "versionings" are not expected'),
    "unknown attribute": ("aws", r"current\.region", "current.regoin", 'exported attribute named "regoin"'),
    "wrong type": ("gcp", "age = 7", 'age = "a week"', "a number is required"),
}
#: Likewise, for what only the modules' own tests can find.
FLAWS = {
    "no versions": ("aws", 'status = "Enabled" # what', 'status = "Suspended" # what', "pin=version needs versioning."),
    "any issuer": ("aws", r"Federated = one\.oidc_provider_arn", 'Federated = "*"', "must trust one OIDC provider."),
    "any audience": ("aws", 'aud" = "sts.amazonaws.com"', 'aud" = "*"', "one service account, by sub and aud."),
    "any prefix": (
        "modules/reader-policy",
        r"prefix\}/\*\"\] \}",
        'prefix}*"] }',
        "Listing must be limited to the folder",
    ),
}


@pytest.fixture
def spoil(terraform: Terraform) -> Callable[[str, str, str], Terraform]:
    """Return a function that makes a copy of the tree, in which a module has a mistake."""

    def make(module: str, right: str, wrong: str) -> Terraform:
        tree = terraform.tree.with_name("spoilt")
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(terraform.tree, tree, ignore=shutil.ignore_patterns(".terraform*"))
        (file,) = (path for path in (tree / module).glob("*.tf") if re.search(right, path.read_text()))
        file.write_text(re.sub(right, wrong, file.read_text(), count=1))
        return Terraform(terraform.binary, terraform.providers, tree)

    return make


@pytest.mark.parametrize("mistake", MISTAKES)
def test_validate_finds(mistake: str, spoil: Callable[[str, str, str], Terraform]) -> None:
    module, right, wrong, said = MISTAKES[mistake]
    done = spoil(module, right, wrong).run(module, "validate")
    assert done.returncode == 1, done.stdout
    assert said in " ".join(done.stdout.split()), done.stdout


@pytest.mark.parametrize("flaw", FLAWS)
def test_own_tests_find(flaw: str, spoil: Callable[[str, str, str], Terraform]) -> None:
    module, right, wrong, said = FLAWS[flaw]
    done = spoil(module, right, wrong).run(module, "test")
    assert done.returncode == 1, done.stdout
    assert said in " ".join(done.stdout.split()), done.stdout


@pytest.mark.parametrize("name", POLICY_ARGUMENTS)
def test_golden_policies_are_what_terraform_makes(terraform: Terraform, name: str, tmp_path: Path) -> None:
    """The tests with moto read the committed copies, so that they need no Terraform."""
    module, state, values = "modules/reader-policy", tmp_path / "state", tmp_path / "values.tfvars.json"
    values.write_text(json.dumps(POLICY_ARGUMENTS[name]))
    assert terraform.run(module, "init").returncode == 0
    done = terraform.run(module, "apply", "-auto-approve", f"-state={state}", f"-var-file={values}")
    assert done.returncode == 0, done.stdout
    outputs = json.loads(state.read_text())["outputs"]
    assert {kind: json.loads(outputs[f"{kind}_json"]["value"]) for kind in ("reader", "publisher")} == golden(name)


def test_types_that_the_bindings_lack_are_an_error(wheels: Path) -> None:
    (wheel,) = wheels.glob("cdktn_provider_google-*.whl")
    with pytest.raises(ValueError, match="no bindings for data.google_weights, google_storage_buckit$"):
        read_schema(wheel, ["google_storage_bucket", "google_storage_buckit", "data.google_weights"])


def test_tree_has_no_state_or_lock() -> None:
    """A lock file made with providers that are schemas only would be wrong for everybody else."""
    found = [
        path
        for path in (ROOT / "terraform").rglob("*")
        if path.name == ".terraform.lock.hcl" or ".tfstate" in path.name
    ]
    assert not found
