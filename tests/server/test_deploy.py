"""The files of `deploy/`: they are read, and name only metrics, options and settings that exist."""

from __future__ import annotations

import configparser
import json
import re
import tomllib
from typing import Any

import jsonschema
import msgspec
import pytest
import typer
import yaml

from everystep.cli.app import app
from everystep.server.metrics import ServerMetrics
from everystep.server.routes import READ_ONLY
from everystep.server.settings import ServeSettings
from tests.reading import ROOT

FOLDER = ROOT / "deploy"
GUIDE = (ROOT / "docs" / "guide" / "deployment.md").read_text(encoding="utf-8")
TREE: Any = typer.main.get_command(app)
RAY_OPTIONS = {"--address", "--num-cpus"}  # of `ray start`
OPTIONS = {name for one in TREE.commands["serve"].params for name in one.opts}


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def samples() -> set[str]:
    """The names of all samples that a server has."""
    metrics = ServerMetrics()
    text = metrics.shown({"m": (0, 0)}).decode()
    found = set(re.findall(r"^# TYPE (\S+) ", text, re.M))
    histograms = set(re.findall(r"^# TYPE (\S+) histogram$", text, re.M))
    return found | {f"{one}{end}" for one in histograms for end in ("_bucket", "_sum", "_count")}


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    board = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
    asked = [one["expr"] for panel in board["panels"] for one in panel["targets"]]
    asked += [one["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    known = samples()
    for line in asked:
        names = set(re.findall(r"everystep_\w+", line))
        assert names and names <= known, line
        assert line.count("(") == line.count(")") and line.count("[") == line.count("]")
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) >= 10
    spots = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in board["panels"]]
    assert len(set(spots)) == len(spots)


@pytest.mark.parametrize(
    "name", ["kubernetes.yaml", "compose.yaml", "everystep.service", "ray.yaml"]
)
def test_commands_have_options_that_exist(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    said = set(re.findall(r"(?<=[\s\"])(--[a-z][a-z-]+)", re.sub(r"^ *#.*$", "", text, flags=re.M)))
    assert said and said - RAY_OPTIONS <= OPTIONS


def test_a_pod_is_no_root_and_is_asked_at_routes_that_exist() -> None:
    found = {one["kind"]: one for one in documents("kubernetes.yaml")}
    assert set(found) == {"PersistentVolumeClaim", "Deployment", "Service"}
    pod = found["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    own = container["securityContext"]
    assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] in READ_ONLY
        assert container[probe]["httpGet"]["port"] == container["ports"][0]["name"]
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    assert grace > ServeSettings().drain_seconds
    assert found["Service"]["spec"]["selector"] == pod["metadata"]["labels"]
    assert {one["name"] for one in container["volumeMounts"]} == {
        one["name"] for one in pod["spec"]["volumes"]
    }
    assert "--host=0.0.0.0" in container["args"]
    assert any(one.startswith("--key-file=") for one in container["args"]), "or it does not start"


def test_containers_are_no_root_and_only_the_proxy_is_published() -> None:
    (found,) = documents("compose.yaml")
    server, proxy = found["services"]["everystep"], found["services"]["proxy"]
    assert "ports" not in server and server["user"] != "0:0" and proxy["ports"]
    for one in (server, proxy):
        assert one["cap_drop"] == ["ALL"] and one["read_only"] is True
    assert any(one.startswith("--key-file=") for one in server["command"])


def test_the_settings_are_settings() -> None:
    read = tomllib.loads((FOLDER / "serve.toml").read_text(encoding="utf-8"))
    settings = msgspec.convert(read, ServeSettings)
    assert settings.quota is not None and settings.allow_hosts
    assert set(read) <= set(ServeSettings.__struct_fields__)


def test_the_service_waits_for_the_drain() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(FOLDER / "everystep.service", encoding="utf-8")
    service = unit["Service"]
    settings = tomllib.loads((FOLDER / "serve.toml").read_text(encoding="utf-8"))
    assert int(service["TimeoutStopSec"]) > settings["drain_seconds"]
    assert service["DynamicUser"] == "yes" and service["NoNewPrivileges"] == "yes"
    assert service["ExecStart"].endswith("everystep serve --settings /etc/everystep/serve.toml")
    assert set(unit.sections()) == {"Unit", "Service", "Install"}


def test_the_proxy_passes_on_what_the_server_judges() -> None:
    text = (FOLDER / "nginx.conf").read_text(encoding="utf-8")
    assert text.count("{") == text.count("}")
    for line in ("proxy_set_header Host $host;", "proxy_buffering off;", "X-Forwarded-Proto"):
        assert line in text
    (scraped,) = documents("prometheus.yaml")[0]["scrape_configs"]
    assert scraped["metrics_path"] in READ_ONLY and scraped["authorization"]["type"] == "Bearer"


def test_the_guide_names_every_file() -> None:
    pages = ("deployment.md", "replicas.md", "many-ranks.md")
    told = "".join((ROOT / "docs" / "guide" / one).read_text(encoding="utf-8") for one in pages)
    for file in FOLDER.iterdir():
        assert f"deploy/{file.name}" in told, file.name


def test_the_cluster_of_kuberay_is_as_its_schema_says() -> None:
    cluster = documents("ray.yaml")[0]
    path = ROOT / "tests" / "server" / "raycluster.schema.json"
    jsonschema.validate(cluster, json.loads(path.read_text(encoding="utf-8")))
    head, (workers,) = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0", "no engine beside what all depend on"
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    (worker,) = workers["template"]["spec"]["containers"]
    assert workers["rayStartParams"]["num-cpus"] == worker["resources"]["limits"]["cpu"]
    for group in (head, workers):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert {one["name"] for one in container["env"]} == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}
        mounts = {one["name"] for one in container.get("volumeMounts", ())}
        assert mounts == {one["name"] for one in pod.get("volumes", ())}
    version = cluster["spec"]["rayVersion"]
    (ray,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["ray"]
    assert version.startswith(ray.rpartition(">=")[2])


def test_the_front_is_a_node_of_the_cluster_and_drains() -> None:
    cluster, deployment, service = documents("ray.yaml")
    spec = deployment["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    (script,) = container["args"]
    joined, serve = script.split(" && exec ")
    assert f"--address={cluster['metadata']['name']}-head-svc:6379" in joined
    words = serve.split()
    assert words[:2] == ["everystep", "serve"] and "--ray-address=auto" in words
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    assert f"--max-replicas={workers['maxReplicas']}" in words
    assert f"--threads={workers['rayStartParams']['num-cpus']}" in words
    assert pod["terminationGracePeriodSeconds"] > 2 * ServeSettings().drain_seconds
    (engine,) = workers["template"]["spec"]["containers"]
    assert container["env"] == engine["env"] and container["image"] == engine["image"]
    assert service["spec"]["selector"] == spec["template"]["metadata"]["labels"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] in READ_ONLY
    assert {one["name"] for one in container["volumeMounts"]} == {
        one["name"] for one in pod["volumes"]
    }
