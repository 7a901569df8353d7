"""The shell guard and Kubernetes commands: those that end, evict, or hide a job, and harmless lookalikes."""

from __future__ import annotations

import pytest

from guard_kit import RULES, shell, verdict

STOPPED = r"""
kubectl taint nodes gpu-1 maintenance=yes:NoExecute
kubectl taint node -l pool=gpu maintenance:NoExecute --overwrite
kubectl --context gpu taint nodes --all a=b:NoSchedule c=d:NoExecute
oc adm taint nodes gpu-1 maintenance=yes:NoExecute
kubectl create --raw /api/v1/namespaces/ml/pods/train-0/eviction -f eviction.json
kubectl create --raw=/api/v1/namespaces/ml/pods/train-0/eviction?timeout=5s -f -
kubectl create -f - --raw "/api/v1/namespaces/ml/pods/$POD/eviction" < e.json
kubectl -n label taint nodes gpu-1 maintenance=yes:NoExecute
kubectl --context scale label job gw-t1-a1 gpuwarden.dev/job-
kubectl drain gpu-1 --ignore-daemonsets --delete-emptydir-data
oc adm drain gpu-1 --force
kubectl replace --force -f job.yaml
kubectl replace -f job.yaml --force=true
kubectl delete --raw /apis/batch/v1/namespaces/ml/jobs/train
kubectl delete --raw=/api/v1/namespaces/ml/pods/train-0
kubectl scale --replicas=0 deploy/train
kubectl scale deploy/train --replicas=00
kubectl scale deploy/train --replicas 0x0
kubecolor delete pod train-0
microk8s.kubectl delete pod train-0
microk8s kubectl delete pod train-0
k3s kubectl drain gpu-1
oc idle train
kubectl patch job train -p '{"spec":{"activeDeadlineSeconds":1}}'
kubectl patch pod train-0 --type=json -p '[{"op":"add","path":"/spec/activeDeadlineSeconds","value":1}]'
kubectl patch node gpu-1 -p '{"spec":{"taints":[{"key":"a","effect":"NoExecute"}]}}'
kubectl patch job gw-t1-a1 -p '{"metadata":{"labels":{"gpuwarden.dev/job":null}}}'
kubectl patch job gw-t1-a1 --type=json -p '[{"op":"remove","path":"/metadata/labels/gpuwarden.dev~1job"}]'
kubectl label job gw-t1-a1 gpuwarden.dev/job-
kubectl label --overwrite job/gw-t1-a1 gpuwarden.dev/attempt=9
kubectl annotate jobs --all gpuwarden.dev/token-
curl -X PATCH https://cluster:6443/api/v1/nodes/gpu-1 -d '{"spec":{"taints":[{"effect":"NoExecute","key":"x"}]}}'
curl -X POST https://cluster:6443/api/v1/namespaces/ml/pods/train-0/eviction -d @e.json
python -c "import subprocess; subprocess.run(['kubectl', 'taint', 'nodes', 'gpu-1', 'a=b:NoExecute'])"
python -c "import os; os.system('kubectl create --raw /api/v1/namespaces/ml/pods/p/eviction -f e')"
python -c "batch.patch_namespaced_job('train', 'ml', {'spec': {'suspend': True}})"
python -c "core.patch_node('gpu-1', {'spec': {'taints': [{'key': 'a', 'effect': 'NoExecute'}]}})"
""".strip().splitlines()

PASSED = r"""
kubectl taint nodes gpu-1 maintenance=yes:NoExecute-
kubectl taint nodes gpu-1 maintenance=yes:NoSchedule
kubectl taint nodes gpu-1 maintenance=yes:PreferNoSchedule --overwrite
kubectl taint nodes gpu-1 maintenance=yes:NoExecute --dry-run=server
kubectl drain gpu-1 --dry-run=client
kubectl cordon gpu-1
kubectl uncordon gpu-1
kubectl create --raw /apis/batch/v1/namespaces/ml/jobs -f job.json
kubectl create -f job.yaml
kubectl create configmap eviction --from-file=notes
kubectl get --raw /api/v1/namespaces/ml/pods/train-0
kubectl get --raw /metrics
kubectl replace -f configmap.yaml
kubectl scale deploy/web --replicas=1
kubectl scale deploy/web --replicas=10
kubectl label node gpu-1 pool=gpu
kubectl label pvc runs gpuwarden.dev/runs=yes
kubectl annotate pvc runs gpuwarden.dev/image=python:3.12
kubectl get jobs -l gpuwarden.dev/job
kubectl describe node gpu-1 | grep NoExecute
kubectl patch job train -p '{"metadata":{"labels":{"team":"ml"}}}'
kubectl explain job.spec.activeDeadlineSeconds
kubectl config delete-me
echo 'kubectl taint nodes gpu-1 a=b:NoExecute' > notes.md
python -c "core.read_node('gpu-1')"
""".strip().splitlines()


@pytest.mark.parametrize("command", STOPPED)
def test_commands_that_end_evict_or_hide_a_job_are_stopped(command: str) -> None:
    assert shell(command, RULES)


@pytest.mark.parametrize("command", PASSED)
def test_harmless_cluster_commands_pass(command: str) -> None:
    assert shell(command, RULES) is None


def test_cluster_tool_that_evicts_pods_is_stopped() -> None:
    assert verdict('@tool mcp__kubernetes__evict_pod {"name": "train-0"}')
    assert verdict('@tool mcp__k8s__pods_eviction {"name": "train-0"}')
    assert verdict('@tool mcp__k8s__pods_list {"namespace": "ml"}') is None
