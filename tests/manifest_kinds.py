"""A schema of Kubernetes' kinds: the subset that the manifests of `deploy/` use."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class Metadata:
    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class PodMetadata:
    labels: dict[str, str]


@dataclass(kw_only=True)
class KeyOf:
    name: str
    key: str


@dataclass(kw_only=True)
class ValueFrom:
    secretKeyRef: KeyOf  # noqa: N815 - Kubernetes' own names, here and below


@dataclass(kw_only=True)
class Variable:
    name: str
    value: str | None = None
    valueFrom: ValueFrom | None = None  # noqa: N815


@dataclass(kw_only=True)
class Named:
    name: str


@dataclass(kw_only=True)
class Variables:
    secretRef: Named | None = None  # noqa: N815
    configMapRef: Named | None = None  # noqa: N815


@dataclass(kw_only=True)
class ContainerPort:
    name: str
    containerPort: int  # noqa: N815


@dataclass(kw_only=True)
class Exec:
    command: list[str]


@dataclass(kw_only=True)
class Socket:
    port: str


@dataclass(kw_only=True)
class Probe:
    periodSeconds: int  # noqa: N815
    exec: Exec | None = None
    tcpSocket: Socket | None = None  # noqa: N815


@dataclass(kw_only=True)
class Capabilities:
    drop: list[Literal["ALL"]]


@dataclass(kw_only=True)
class Confined:
    allowPrivilegeEscalation: Literal[False]  # noqa: N815
    capabilities: Capabilities


@dataclass(kw_only=True)
class Resources:
    requests: dict[Literal["cpu", "memory", "storage"], str]
    limits: dict[Literal["cpu", "memory"], str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Mount:
    name: str
    mountPath: str  # noqa: N815
    readOnly: bool = False  # noqa: N815


@dataclass(kw_only=True)
class Container:
    name: str
    image: str
    resources: Resources
    volumeMounts: list[Mount]  # noqa: N815
    command: list[str] = field(default_factory=list)
    env: list[Variable] = field(default_factory=list)
    envFrom: list[Variables] = field(default_factory=list)  # noqa: N815
    ports: list[ContainerPort] = field(default_factory=list)
    readinessProbe: Probe | None = None  # noqa: N815
    securityContext: Confined | None = None  # noqa: N815


@dataclass(kw_only=True)
class User:
    runAsNonRoot: Literal[True]  # noqa: N815
    runAsUser: int  # noqa: N815
    fsGroup: int  # noqa: N815


@dataclass(kw_only=True)
class EmptyDir:
    sizeLimit: str = ""  # noqa: N815


@dataclass(kw_only=True)
class Volume:
    name: str
    configMap: Named | None = None  # noqa: N815
    emptyDir: EmptyDir | None = None  # noqa: N815


@dataclass(kw_only=True)
class PodSpec:
    securityContext: User  # noqa: N815
    containers: list[Container]
    enableServiceLinks: Literal[False]  # noqa: N815 - they set MLFLOW_PORT to no number
    volumes: list[Volume] = field(default_factory=list)
    automountServiceAccountToken: bool = True  # noqa: N815


@dataclass(kw_only=True)
class Pod:
    metadata: PodMetadata
    spec: PodSpec


@dataclass(kw_only=True)
class Selector:
    matchLabels: dict[str, str]  # noqa: N815


@dataclass(kw_only=True)
class ClaimSpec:
    accessModes: list[Literal["ReadWriteOnce"]]  # noqa: N815
    resources: Resources


@dataclass(kw_only=True)
class Claim:
    metadata: Metadata
    spec: ClaimSpec


@dataclass(kw_only=True)
class WorkloadSpec:
    replicas: int
    selector: Selector
    template: Pod
    serviceName: str = ""  # noqa: N815
    volumeClaimTemplates: list[Claim] = field(default_factory=list)  # noqa: N815


@dataclass(kw_only=True)
class Workload:
    apiVersion: Literal["apps/v1"]  # noqa: N815
    kind: Literal["Deployment", "StatefulSet"]
    metadata: Metadata
    spec: WorkloadSpec


@dataclass(kw_only=True)
class ServicePort:
    name: str
    port: int


@dataclass(kw_only=True)
class ServiceSpec:
    selector: dict[str, str]
    ports: list[ServicePort]  # no `type`: inside the cluster only


@dataclass(kw_only=True)
class Service:
    apiVersion: Literal["v1"]  # noqa: N815
    kind: Literal["Service"]
    metadata: Metadata
    spec: ServiceSpec


@dataclass(kw_only=True)
class ConfigMap:
    apiVersion: Literal["v1"]  # noqa: N815
    kind: Literal["ConfigMap"]
    metadata: Metadata
    data: dict[str, str]


@dataclass(kw_only=True)
class Auth:
    mode: Literal["token"]


@dataclass(kw_only=True)
class Autoscaler:
    idleTimeoutSeconds: int  # noqa: N815


@dataclass(kw_only=True)
class Head:
    rayStartParams: dict[str, str]  # noqa: N815
    template: Pod


@dataclass(kw_only=True)
class Workers:
    groupName: str  # noqa: N815
    replicas: int
    minReplicas: int  # noqa: N815
    maxReplicas: int  # noqa: N815
    rayStartParams: dict[str, str]  # noqa: N815
    template: Pod


@dataclass(kw_only=True)
class RayClusterSpec:
    rayVersion: str  # noqa: N815
    authOptions: Auth  # noqa: N815
    enableInTreeAutoscaling: bool  # noqa: N815
    autoscalerOptions: Autoscaler  # noqa: N815
    headGroupSpec: Head  # noqa: N815
    workerGroupSpecs: list[Workers]  # noqa: N815


@dataclass(kw_only=True)
class RayJobSpec:
    entrypoint: str
    shutdownAfterJobFinishes: bool  # noqa: N815
    ttlSecondsAfterFinished: int  # noqa: N815
    backoffLimit: int  # noqa: N815
    rayClusterSpec: RayClusterSpec  # noqa: N815


@dataclass(kw_only=True)
class RayJob:
    apiVersion: Literal["ray.io/v1"]  # noqa: N815
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: RayJobSpec


KINDS = {
    "Service": Service,
    "ConfigMap": ConfigMap,
    "Deployment": Workload,
    "StatefulSet": Workload,
    "RayJob": RayJob,
}
