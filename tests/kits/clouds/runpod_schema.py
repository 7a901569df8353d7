"""The published schema of RunPod's older GraphQL API, and the formats of its replies.

Fields and inputs that the schema lacks are refused with status 200 and `errors`, as by the service. The service turns
this API off early in 2027; interruptible Pods are removed from it earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from typing import Any, Final

from graphql import GraphQLError, GraphQLSchema, build_schema, graphql_sync

from clouds.base import Reply, Request
from gpuwarden.core.models import Instance, InstanceState

_S = InstanceState
_DEPLOY = """
  aiApiId: String allowedCudaVersions: [String] cloudType: CloudTypeEnum compliance: [String] computeType: ComputeType
  containerDiskInGb: Int containerRegistryAuthId: String countryCode: String cudaVersion: String dataCenterId: String
  deployCost: Float dockerArgs: String env: [EnvironmentVariableInput] globalNetwork: Boolean gpuCount: Int
  gpuTypeId: String gpuTypeIdList: [String] imageName: String instanceId: String instanceIds: [String]
  minCudaVersion: String minDisk: Int minDownload: Int minMemoryInGb: Int minUpload: Int minVcpuCount: Int name: String
  networkVolumeId: String port: Int ports: String startJupyter: Boolean startSsh: Boolean stopAfter: DateTime
  supportPublicIp: Boolean templateId: String terminateAfter: DateTime volumeInGb: Float volumeKey: String
  volumeMountPath: String
"""
SCHEMA: Final = f"""
scalar DateTime
enum CloudTypeEnum {{ ALL COMMUNITY SECURE }}
enum ComputeType {{ GPU CPU }}
enum PodStatus {{ CREATED RUNNING RESTARTING EXITED PAUSED DEAD TERMINATED }}
input EnvironmentVariableInput {{ key: String! value: String! }}
input PodFindAndDeployOnDemandInput {{ {_DEPLOY} }}
input PodRentInterruptableInput {{ {_DEPLOY} bidPerGpu: Float }}
input deployCpuPodInput {{ {_DEPLOY} }}
input PodFilter {{ podId: String }}
input PodStopInput {{ podId: String! incrementVersion: Boolean }}
input PodTerminateInput {{ podId: String! }}
input PodResumeInput {{ podId: String! gpuCount: Int syncMachine: Boolean computeType: ComputeType }}
input PodBidResumeInput {{ podId: String! gpuCount: Int bidPerGpu: Float! }}
input UpdateUserSettingsInput {{ pubKey: String }}
input GpuTypeFilter {{ id: String ids: [String] cluster: Boolean }}
input GpuLowestPriceInput {{
  gpuCount: Int minDisk: Int minMemoryInGb: Int minVcpuCount: Int secureCloud: Boolean dataCenterId: String
  countryCode: String minCudaVersion: String totalDisk: Int supportPublicIp: Boolean compliance: [String]
}}
type PodMachineInfo {{ gpuDisplayName: String podHostId: String location: String }}
type PodRuntimePort {{ ip: String isIpPublic: Boolean privatePort: Int publicPort: Int type: String }}
type PodRuntime {{ uptimeInSeconds: Int ports: [PodRuntimePort] }}
type Pod {{
  id: String! name: String imageName: String desiredStatus: PodStatus costPerHr: Float containerDiskInGb: Int
  containerRegistryAuthId: String volumeInGb: Float volumeMountPath: String gpuCount: Int memoryInGb: Float
  vcpuCount: Float ports: String port: Int lastStatusChange: String env: [String] dockerArgs: String dockerId: String
  machineId: String podType: String uptimeSeconds: Int networkVolumeId: String templateId: String
  machine: PodMachineInfo runtime: PodRuntime
}}
type NetworkVolume {{ id: String! name: String size: Int dataCenterId: String }}
type PodTemplate {{ id: String name: String containerRegistryAuthId: String }}
type User {{
  id: String! pubKey: String email: String clientBalance: Float currentSpendPerHr: Float spendLimit: Int
  notifyPodsStale: Boolean notifyPodsGeneral: Boolean notifyLowBalance: Boolean
  pods: [Pod] networkVolumes: [NetworkVolume] podTemplates: [PodTemplate]
}}
type LowestPrice {{
  gpuName: String gpuTypeId: String minimumBidPrice: Float uninterruptablePrice: Float minMemory: Int minVcpu: Int
  stockStatus: String compliance: [String] countryCode: String
}}
type GpuType {{
  id: String! displayName: String memoryInGb: Int manufacturer: String cudaCores: Int maxGpuCount: Int
  maxGpuCountSecureCloud: Int maxGpuCountCommunityCloud: Int minPodGpuCount: Int secureCloud: Boolean
  communityCloud: Boolean securePrice: Float communityPrice: Float clusterPrice: Float oneWeekPrice: Float
  oneMonthPrice: Float threeMonthPrice: Float sixMonthPrice: Float secureSpotPrice: Float communitySpotPrice: Float
  nodeGroupDatacenters: [DataCenter] lowestPrice(input: GpuLowestPriceInput): LowestPrice
}}
type GpuAvailability {{ gpuTypeId: String displayName: String stockStatus: String }}
type DataCenter {{ id: String name: String location: String listed: Boolean gpuAvailability: [GpuAvailability] }}
type Query {{
  myself: User pod(input: PodFilter): Pod gpuTypes(input: GpuTypeFilter): [GpuType] dataCenters: [DataCenter]
  countryCodes: [String]
}}
type Mutation {{
  podFindAndDeployOnDemand(input: PodFindAndDeployOnDemandInput!): Pod
  podRentInterruptable(input: PodRentInterruptableInput!): Pod
  deployCpuPod(input: deployCpuPodInput!): Pod
  podResume(input: PodResumeInput!): Pod
  podBidResume(input: PodBidResumeInput!): Pod
  podStop(input: PodStopInput!): Pod
  podTerminate(input: PodTerminateInput!): Boolean
  updateUserSettings(input: UpdateUserSettingsInput): User
}}
"""
DATA_CENTER: Final = "EU-RO-1"
Answers = Mapping[str, Any]


@cache
def schema() -> GraphQLSchema:
    return build_schema(SCHEMA)


def execute(request: Request, answers: Answers) -> Reply:
    """Answer one request from `answers`, which maps each root field to a value or a function of the input."""
    body = request.body if isinstance(request.body, dict) else {}
    if set(body) - {"query", "variables", "operationName"} or not isinstance(body.get("query"), str):
        return Reply(400, {"errors": [{"message": "Must provide query string."}]})
    roots = {name: _resolver(value) if callable(value) else value for name, value in answers.items()}
    done = graphql_sync(schema(), body["query"], root_value=roots, variable_values=body.get("variables") or {})
    reply: dict[str, Any] = {} if done.data is None else {"data": done.data}  # refused before execution
    if done.errors:
        reply["errors"] = [{"message": error.message, "path": error.path} for error in done.errors]
    return Reply(200, reply)


def _resolver(answer: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    return lambda info, input=None: answer(input or {})


def refuse(message: str) -> GraphQLError:
    return GraphQLError(message)


def order_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deployment's input as an order of REST v2."""
    volume = {"volumeId": given.get("networkVolumeId"), "path": given.get("volumeMountPath") or "/workspace"}
    disk = {"size": int(given.get("volumeInGb") or 0), "path": given.get("volumeMountPath") or "/workspace"}
    return {
        "name": given.get("name") or "pod",
        "image": given.get("imageName") or "",
        "cloud": {"SECURE": "SECURE", "COMMUNITY": "COMMUNITY"}.get(given.get("cloudType") or "ALL", "SECURE"),
        "gpu": {"id": given.get("gpuTypeId") or "", "count": given.get("gpuCount") or 1},
        "disk": given.get("containerDiskInGb") or 20,
        "ports": [port for port in (given.get("ports") or "").split(",") if port],
        "env": {item["key"]: item["value"] for item in given.get("env") or []},
        "mounts": {"network": [volume]} if volume["volumeId"] else {"persistent": disk} if disk["size"] else {},
        "args": given.get("dockerArgs") or "",
    }


def pod(i: Instance, own: Mapping[str, Any], status: str, address: tuple[str, int], uptime: int) -> dict[str, Any]:
    """Return a Pod as this API shows it. A booting Pod is RUNNING without a runtime."""
    order = own["order"]
    (host, port), mounts = address, order.get("mounts", {})
    inside = [p.partition("/") for p in order.get("ports", [])]
    mapped = [
        {"ip": host, "isIpPublic": kind == "tcp", "privatePort": int(p), "publicPort": port + n, "type": kind}
        for n, (p, _, kind) in enumerate(sorted(inside, key=lambda part: part[0] != "22"))
    ]
    return {
        "id": i.id,
        "name": own["label"],
        "imageName": order.get("image", ""),
        "desiredStatus": {"EXITED": "EXITED", "TERMINATED": "TERMINATED"}.get(status, "RUNNING"),
        "costPerHr": i.price_usd_per_hour or 0.0,
        "containerDiskInGb": order.get("disk", 50),
        "volumeInGb": mounts.get("persistent", {}).get("size", 0),
        "volumeMountPath": mounts.get("persistent", {}).get("path", ""),
        "gpuCount": order["gpu"].get("count", 1),
        "memoryInGb": 125,
        "vcpuCount": 16,
        "ports": ",".join(order.get("ports", [])),
        "lastStatusChange": "Rented by User",
        "env": [f"{name}={value}" for name, value in order.get("env", {}).items()],
        "dockerArgs": order.get("args", ""),
        "machineId": "m1",
        "podType": "INTERRUPTABLE" if own.get("bid") else "RESERVED",
        "uptimeSeconds": uptime,
        "machine": {"gpuDisplayName": order["gpu"]["id"], "podHostId": f"{i.id}-64411eb2", "location": "RO"},
        "runtime": {"uptimeInSeconds": uptime, "ports": mapped} if status == "RUNNING" else None,
    }


def gpu_type(name: str, display: str, usd: float, *, stock: bool) -> dict[str, Any]:
    """Return one GPU type with its prices."""
    return {
        "id": name,
        "displayName": display,
        "memoryInGb": 80,
        "manufacturer": "Nvidia",
        "cudaCores": 0,
        "maxGpuCount": 8,
        "maxGpuCountSecureCloud": 8,
        "maxGpuCountCommunityCloud": 4,
        "minPodGpuCount": 1,
        "secureCloud": True,
        "communityCloud": True,
        "securePrice": usd,
        "communityPrice": usd / 2,
        "clusterPrice": usd,
        "secureSpotPrice": None,
        "communitySpotPrice": None,
        "nodeGroupDatacenters": [],
        "lowestPrice": lambda info, input=None: {
            "gpuName": name,
            "gpuTypeId": name,
            "minimumBidPrice": None,
            "uninterruptablePrice": usd if (input or {}).get("secureCloud", True) else usd / 2,
            "minMemory": 125,
            "minVcpu": 16,
            "stockStatus": "High" if stock else None,
            "compliance": [],
            "countryCode": "RO",
        },
    }


def moment(text: str | None) -> float | None:
    """Return a request's date in seconds since the epoch. Raises GraphQLError if the text is not a date."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise refuse(f"DateTime cannot represent an invalid date-time-string {text}") from None
