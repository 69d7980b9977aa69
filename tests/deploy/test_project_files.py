"""Files that a code host reads (issue forms, updates, workflows), and those that newcomers look for."""

from __future__ import annotations

import importlib.resources
import json
import re
import tomllib

import jsonschema
import pytest
import yaml

from tests.deploy.facts import ROOT

GITHUB = ROOT / ".github"
SCHEMAS = importlib.resources.files("check_jsonschema") / "builtin_schemas/vendor"
SCHEMA_OF_FILE = {
    **dict.fromkeys(sorted((GITHUB / "workflows").glob("*.yml")), "github-workflows"),
    **dict.fromkeys(sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml")), "github-issue-forms"),
    GITHUB / "ISSUE_TEMPLATE/config.yml": "github-issue-config",
    GITHUB / "dependabot.yml": "dependabot",
}
TARGETS = set(re.findall(r"^([a-z-]+)[a-z -]*:", (ROOT / "Makefile").read_text(), re.MULTILINE))


def load(path):
    content = yaml.safe_load(path.read_text())
    if True in content:  # in YAML 1.1, which this parser reads, `on` is a truth value
        content["on"] = content.pop(True)
    return content


@pytest.mark.parametrize("path", SCHEMA_OF_FILE, ids=lambda path: str(path.relative_to(GITHUB)))
def test_file_matches_its_schema(path):
    schema = json.loads((SCHEMAS / f"{SCHEMA_OF_FILE[path]}.json").read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [error.message for error in validator.iter_errors(load(path))] == []


def test_there_is_a_form_for_each_kind_of_issue():
    forms = {path.stem for path, schema in SCHEMA_OF_FILE.items() if schema == "github-issue-forms"}
    assert forms == {"bug", "feature", "question"}


def test_workflows_run_nothing_but_make_targets():
    jobs = [job for path in (GITHUB / "workflows").glob("*.yml") for job in load(path)["jobs"].values()]
    commands = [step["run"].split() for job in jobs for step in job["steps"] if "run" in step]
    assert {program for program, _ in commands} == {"make"}
    assert {target for _, target in commands} - TARGETS == set()
    assert {"verify", "test", "test-install"} <= {target for _, target in commands}


def test_workflow_uses_supported_pythons():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest, highest = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"]).groups()
    versions = load(GITHUB / "workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert versions == [f"3.{lowest}", f"3.{int(highest) - 1}"], "the oldest and the newest"


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_of_project_files_lead_somewhere(name):
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_updates_watch_each_image():
    docker = [
        update
        for update in load(GITHUB / "dependabot.yml")["updates"]
        if update["package-ecosystem"] == "docker"
    ]
    folders = {f"/{path.parent.relative_to(ROOT)}" for path in (ROOT / "services").glob("*/Dockerfile")}
    assert {folder for update in docker for folder in update["directories"]} == folders


def test_owners_are_of_folders_that_exist():
    for line in (GITHUB / "CODEOWNERS").read_text().splitlines():
        if line and not line.startswith(("#", "*")):
            assert (ROOT / line.split()[0].strip("/")).is_dir(), line
