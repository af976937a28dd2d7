"""Manifests of propeller and its configuration in Flyte's charts, as Helm renders v1.16.8 of them."""

from typing import Any

# flyte-binary: files of one ConfigMap, ``configuration.inline`` the last of them

BINARY_CORE = """\
admin:
  endpoint: localhost:8089
  insecure: true
catalog-cache:
  endpoint: localhost:8081
  insecure: true
  type: datacatalog
logger:
  show-source: true
  level: 1
propeller:
  create-flyteworkflow-crd: true
webhook:
  certDir: /var/run/flyte/certs
  localCert: true
  secretName: flyte-binary-webhook-secret
  serviceName: flyte-binary-webhook
  servicePort: 443
flyte:
  admin:
    disableClusterResourceManager: false
    disableScheduler: false
    disabled: false
  dataCatalog:
    disabled: false
  propeller:
    disableWebhook: false
    disabled: false
"""
BINARY_PLUGINS = """\
tasks:
  task-plugins:
    default-for-task-types:
      container: container
      container_array: k8s-array
      sidecar: sidecar
    enabled-plugins:
    - container
    - sidecar
    - k8s-array
plugins:
  logs:
    kubernetes-enabled: true
    kubernetes-template-uri: http://localhost:30080/#/log/{{.namespace }}/{{ .podName }}/pod?namespace={{ .namespace }}
  k8s:
    co-pilot:
      image: "cr.flyte.org/flyteorg/flytecopilot:v1.16.8"
"""
BINARY_STORAGE = """\
propeller:
  rawoutput-prefix: s3://bucket/data
storage:
  type: stow
  stow:
    kind: s3
    config:
      region: us-east-1
      disable_ssl: false
      v2_signing: false
      auth_type: iam
  container: bucket
"""

# flyte-core: files named by the keys of ``configmap``; two of them have a section for propeller

CORE_CORE = """\
manager:
  pod-application: flytepropeller
  pod-template-container-name: flytepropeller
  pod-template-name: flytepropeller-template
propeller:
  downstream-eval-duration: 30s
  enable-admin-launcher: true
  leader-election:
    enabled: true
    lock-config-map:
      name: propeller-leader
      namespace: flyte
  limit-namespace: all
{retries}  metadata-prefix: metadata/propeller
  prof-port: 10254
  rawoutput-prefix: s3://bucket/
  workers: 4
webhook:
  certDir: /etc/webhook/certs
  serviceName: flyte-pod-webhook
"""
CORE_RESOURCE_MANAGER = """\
propeller:
  resourcemanager:
    type: noop
"""
CORE_K8S = """\
plugins:
  k8s:
    default-cpus: 100m
    default-env-vars: []
    default-memory: 100Mi
"""


def config_map(namespace: str, name: str, data: dict[str, str] | None) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace},
        **({} if data is None else {"data": data}),
    }


def binary(namespace: str = "flyte", name: str = "flyte-binary", extra: tuple[dict[str, Any], ...] = ()) -> Any:
    """The deployment of flyte-binary, and ``extra`` what ``inlineConfigMap`` or ``inlineSecretRef`` add."""
    sources = [{"configMap": {"name": f"{name}-config"}}, {"secret": {"name": f"{name}-config-secret"}}, *extra]
    container = {
        "name": "flyte",
        "image": "cr.flyte.org/flyteorg/flyte-binary-release:v1.16.8",
        "args": ["start", "--config", "/etc/flyte/config.d/*.yaml"],
        "volumeMounts": [
            {"name": "cluster-resource-templates", "mountPath": "/etc/flyte/cluster-resource-templates"},
            {"name": "config", "mountPath": "/etc/flyte/config.d"},
            {"name": "state", "mountPath": "/var/run/flyte"},
        ],
    }
    templates = {"projected": {"sources": [{"configMap": {"name": f"{name}-cluster-resource-templates"}}]}}
    volumes = [
        {"name": "cluster-resource-templates", **templates},
        {"name": "config", "projected": {"sources": sources}},
        {"name": "state", "emptyDir": {}},
    ]
    return deployment(namespace, name, container, volumes)


def binary_config(
    namespace: str = "flyte", name: str = "flyte-binary", inline: str = "", core: str = BINARY_CORE
) -> dict[str, Any]:
    data = {"000-core.yaml": core, "001-plugins.yaml": BINARY_PLUGINS, "003-storage.yaml": BINARY_STORAGE}
    return config_map(namespace, f"{name}-config", data | ({"100-inline-config.yaml": inline} if inline else {}))


def core(namespace: str = "flyte", name: str = "flytepropeller", secrets: tuple[str, ...] = ()) -> dict[str, Any]:
    """The deployment of flyte-core's propeller, or of its manager; ``secrets`` is its ``storage.secretName``."""
    container = {
        "name": name,
        "image": "cr.flyte.org/flyteorg/flytepropeller:v1.16.8",
        "command": [name, "--config", "/etc/flyte/config/*.yaml"],
        "volumeMounts": [{"name": "config-volume", "mountPath": "/etc/flyte/config"}],
    }
    sources = [{"configMap": {"name": "flyte-propeller-config"}}, *({"secret": {"name": name}} for name in secrets)]
    return deployment(namespace, name, container, [{"name": "config-volume", "projected": {"sources": sources}}])


def core_others(namespace: str = "flyte") -> list[dict[str, Any]]:
    """Deployments of flyte-core that run no propeller: its webhook has the same image and configuration."""
    webhook = {
        "name": "webhook",
        "image": "cr.flyte.org/flyteorg/flytepropeller:v1.16.8",
        "command": ["flytepropeller"],
        "args": ["webhook", "--config", "/etc/flyte/config/*.yaml"],
        "volumeMounts": [{"name": "config-volume", "mountPath": "/etc/flyte/config"}],
    }
    console = {"name": "flyteconsole", "image": "cr.flyte.org/flyteorg/flyteconsole:v1.19.0"}
    volume = {"name": "config-volume", "configMap": {"name": "flyte-propeller-config"}}
    return [
        deployment(namespace, "flyte-pod-webhook", webhook, [volume]),
        deployment(namespace, "flyteconsole", console, []),
    ]


def core_config(retries: str, namespace: str = "flyte") -> dict[str, Any]:
    """``retries`` is the line of ``core.yaml`` that sets them; the chart's own says 30."""
    files = {"core": CORE_CORE.format(retries=retries), "k8s": CORE_K8S, "resource_manager": CORE_RESOURCE_MANAGER}
    return config_map(namespace, "flyte-propeller-config", {f"{name}.yaml": text for name, text in files.items()})


def deployment(namespace: str, name: str, container: dict[str, Any], volumes: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"template": {"spec": {"containers": [container], "volumes": volumes}}},
    }
