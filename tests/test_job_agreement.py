"""Manifests that say one thing twice, edited in one of the places: the check finds each, and passes what was written."""

import copy
import re

import pytest
import yaml

from jaxpar.commands.manifest import main
from jaxpar.jobs import check_manifests, remarks
from jaxpar.jobs.job_sets import check_jobs
from tests.support.written_manifests import (
    BOUND,
    COORDINATOR,
    GPU,
    LIMITS,
    PATCHED,
    REQUESTS,
    SCRAPED,
    SLICE,
    WRITTEN,
    documents,
    edit,
)

CLAIM = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
VOLUMES = (
    ("emptyDir", {}, "deleted with its pod, and no other"),
    ("ephemeral", {"volumeClaimTemplate": {"spec": CLAIM}}, "deleted with its pod, and no other"),
    ("hostPath", {"path": "/data"}, "a folder of a node: a pod on another"),
)
OF_POD = {"fieldRef": {"fieldPath": "metadata.uid"}}
PATTERNS = "spec failurePolicy rules 0 onJobFailureMessagePatterns"


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_is_written_agrees_with_itself(kind):
    check_manifests([*documents(kind)])


@pytest.mark.parametrize(
    ("kind", "place", "value", "message"),
    [
        ("jobset", "main command --mesh.data", "32",
         "got --mesh.data 32, --mesh.stage 2, --mesh.tensor 2, 128 devices, and 2 pods with nvidia.com/gpu 8, 16 devices"),
        ("jobset", "main command --mesh.data", "four", "--mesh.data must be a whole number; got 'four'. Write it in digits."),
        ("jobset", f"{LIMITS} {GPU}", 4, "nvidia.com/gpu of spec.replicatedJobs.0 must be the same in requests and limits"),
        ("jobset", f"{LIMITS} rdma/ib", "4", "rdma/ib of spec.replicatedJobs.0 must be the same in requests and limits; got"),
        ("jobset", "main resources", {"limits": {GPU: 4}}, "16 devices, and 2 pods with nvidia.com/gpu 4, 8 devices"),
        ("jobset", f"{LIMITS} {GPU}", None, "nvidia.com/gpu of spec.replicatedJobs.0 must be the same in requests and limit"),
        ("jobset", f"{REQUESTS} memory", "900Gi", "must be at most the limit in requests and limits; got 900Gi and 800Gi"),
        ("jobset", f"{LIMITS} memory", "much", "memory must be a quantity, such as 8 or 800Gi; got 'much'. Correct it."),
        ("jobset", "pod volumes shm emptyDir sizeLimit", "800Gi", "which counts towards it; got 800Gi and 800Gi"),
        ("jobset", f"notes {SLICE}", "2", "data x context x tensor devices; got 2 pods of 8, and 8 devices a stage"),
        ("jobset", f"notes {SLICE}", None, "need each other; got kueue.x-k8s.io/podset-slice-required-topology alone"),
        ("jobset", "main volumeMounts checkpoints mountPath", "/data",
         "a folder in the command of spec.replicatedJobs.0 must be in a volume; got /checkpoints/gpt, and mounts at /compil"),
        ("jobset", "main command --out-dir", "/checkpoint/gpt",
         "--out-dir of spec.replicatedJobs.0 must be in a volume; got /checkpoint/gpt, and mounts at /checkpoints, /compile"),
        ("jobset", "main command --out-dir", "/checkpoints/../gpt", "must be in a volume; got /checkpoints/../gpt, and moun"),
        ("jobset", "main volumeMounts compiled mountPath", "/programs",
         "JAX_COMPILATION_CACHE_DIR of spec.replicatedJobs.0 must be in a volume; got /compiled, and mounts at /checkpoints"),
        ("jobset", "main volumeMounts compiled mountPath", "/checkpoints", "a path may have one mount; got two at /checkpoi"),
        ("jobset", "main volumeMounts checkpoints readOnly", True, "must be writable; got /checkpoints/gpt in a volume with"),
        ("jobset", "pod volumes checkpoints persistentVolumeClaim readOnly", True, "must be writable; got /checkpoints/gpt in"),
        ("jobset", "main volumeMounts shm", None, "the volumes of spec.replicatedJobs.0 must be mounted; got 'shm', which n"),
        ("jobset", "pod volumes compiled persistentVolumeClaim claimName", "runs", "must not be shared; got runs for two"),
        ("jobset", "main ports", [], "got prometheus.io/port 9090, containerPort metrics missing, --metrics-port 9090. Make"),
        ("jobset", f"notes {SCRAPED}", "1", "got prometheus.io/port 1, containerPort metrics 9090, --metrics-port 9090."),
        ("jobset", "main command --metrics-port", "1", "io/port 9090, containerPort metrics 9090, --metrics-port 1. Make"),
        ("jobset", "main command --metrics-address", "127.0.0.1", "reached from other pods; got --metrics-address 127.0.0.1"),
        ("jobset", "main ports 0 containerPort", 6380, "must be a containerPort of spec.replicatedJobs.0; got 6379, and"),
        ("jobset", BOUND, "$(POD_IP):6380", "one port; got JAX_COORDINATOR_ADDRESS 6379, JAX_COORDINATOR_BIND_ADDRESS 6380."),
        ("jobset", COORDINATOR, "gpt-nodes-0-0.gpt-nodes:1", "one port; got JAX_COORDINATOR_ADDRESS 1, JAX_COORDINATOR_BIND"),
        ("jobset", "job podFailurePolicy rules 0 onExitCodes values", [2, 65], "podFailurePolicy; got [2, 65, 74, 86] and ["),
        ("jobset", "job completionMode", "NonIndexed", "completionMode must be Indexed, by which pods are numbered; got Non"),
        ("jobset", "job backoffLimit", 6, "are restarted together, not alone; got restartPolicy Never and backoffLimit 6."),
        ("jobset", "pod restartPolicy", "OnFailure", "not alone; got restartPolicy OnFailure and backoffLimit 0. Write Neve"),
        ("jobset", "main env", [], "must be told which process each is; got no JAX_COORDINATOR_ADDRESS, JAX"),
        ("jobset", "main image", "", "containers.0.image must name a container image; got none. Give one that has jaxpar."),
        ("jobset", "main command", "python x.py", "command must be a list of words; got 'python x.py'. Write each word in a"),
        ("jobset", "pod subdomain", "gpt", "must be that of spec.network; got 'gpt' and 'gpt-nodes'. Make them equal."),
        ("jobset", "metadata name", "a" * 50, "a pod's name must have at most 63 letters; got 'aaa"),
        ("jobset", "pod volumes compiled persistentVolumeClaim claimName", "", "must name a PersistentVolumeClaim; got none"),
        ("jobset", "spec failurePolicy maxRestarts", -1, "spec.failurePolicy.maxRestarts must be at least 0; got -1. Corr"),
        ("jobset", "spec failurePolicy maxRestarts", "ten", "maxRestarts must be a whole number; got 'ten'. Write it in dig"),
        ("jobset", "pod securityContext runAsNonRoot", True, "must have another user than root, or its container never star"),
        ("jobset", "main securityContext runAsNonRoot", True, "never starts; got runAsUser 0 in spec.replicatedJobs.0. Give"),
        ("jobset", "pod volumes shm emptyDir medium", "", "must be memory, through which the GPUs of a node communicate; go"),
        ("jobset", "pod volumes shm emptyDir sizeLimit", "64Mi", "must have more than 64Mi, which is too little for NCCL; g"),
        ("jobset", "spec network publishNotReadyAddresses", False, "publishNotReadyAddresses of spec.network must be true,"),
        ("jobset", "spec network enableDNSHostnames", False, "enableDNSHostnames of spec.network must be true, since pods"),
        ("trainjob", "pod volumes shm emptyDir medium", None, "at /dev/shm of spec.trainer must be memory, through which th"),
        ("trainjob", "main env +", {"name": "JAX_NUM_PROCESSES", "value": "4"}, "be the number of pods; got 4, numNodes 2."),
        ("trainjob", "main numProcPerNode", 8, "numProcPerNode must be 1, since a pod is one process of the run, with all"),
        ("trainjob", "metadata name", "a" * 60, "a pod's name must have at most 63 letters; got 'aaa"),
        ("service", "pod restartPolicy", "Never", "restartPolicy of a Deployment's pods must be Always; got Never. Leave it"),
        ("service", "spec strategy", {"type": "Recreate", "rollingUpdate": {"maxSurge": 1}}, "not be beside type: Recre"),
        ("trainjob", "main numNodes", 3, "16 devices, and 3 pods with nvidia.com/gpu 8, 24 devices. Make them equal."),
        ("trainjob", "pod containers node volumeMounts checkpoints mountPath", "/data",
         "a folder in the command of spec.trainer must be in a volume; got /checkpoints/gpt, and mounts at /compiled, /data"),
        ("trainjob", f"notes {SCRAPED}", "1", "got prometheus.io/port 1, --metrics-port 9090. Make them equal."),
        ("fake", "main env JAX_NUM_CPU_DEVICES value", "2", "8 devices, and 2 pods with JAX_NUM_CPU_DEVICES 2, 4 devices"),
        ("fake", "main env PJRT_NPROC value", "4", "PJRT_NPROC must be twice JAX_NUM_CPU_DEVICES, or collectives deadlock"),
        ("fake", "main resources", {"limits": {GPU: 4}}, "pods have GPUs or fake devices; got nvidia.com/gpu and JAX_NUM_CP"),
        ("service", f"{LIMITS} {GPU}", 2, "nvidia.com/gpu of spec.template must be the same in requests and limits; got 1 a"),
        ("service", "main volumeMounts checkpoints mountPath", "/data", "in a volume; got /checkpoints/gpt, and mounts at"),
        ("service", "main ports http containerPort", 1, "got prometheus.io/port 8000, containerPort http 1, --port 8000. Ma"),
        ("service", "main command --port", "1", "got prometheus.io/port 8000, containerPort http 8000, --port 1. Make them"),
        ("service", "main command --address", "localhost", "from other pods; got --address localhost. Give --address 0.0.0."),
        ("service", "pod terminationGracePeriodSeconds", 30, "more than --timeout-seconds, after 5 s of preStop; got 30 and"),
        ("service", "main lifecycle preStop exec command 1", "20", "after 20 s of preStop; got 75 and 60. Raise it."),
        ("service", "main lifecycle preStop", {"sleep": {"seconds": 20}}, "after 20 s of preStop; got 75 and 60. Raise it."),
        ("monitor", "spec selector matchLabels batch.kubernetes.io/job-completion-index", "1",
         "a PodMonitor must select process 0, which alone serves metrics; got batch.kubernetes.io/job-completion-index '1'"),
        ("service", "main livenessProbe httpGet port", 80, "livenessProbe must ask a named port of the container; got 80."),
        ("service", "main readinessProbe httpGet path", "/ready", "readinessProbe must ask for /readyz; got '/ready'. Corr"),
        ("service", "main livenessProbe httpGet path", "/readyz", "livenessProbe must ask for /healthz; got '/readyz'. Corr"),
        ("jobset", "main env POD_IP", None, "$(POD_IP) in spec.replicatedJobs.0 must be a variable of its container; got no"),
        ("jobset", "main command --out-dir", "/checkpoints/$(RUN)", "$(RUN) in spec.replicatedJobs.0 must be a variable of"),
        ("jobset", "main env JAX_NUM_PROCESSES", {"name": "JAX_COORDINATOR_ADDRESS", "value": "$(JAXPAR_RUN_TOKEN)"},
         "$(JAXPAR_RUN_TOKEN) in a value of env must be a variable before it, which alone Kubernetes puts in its place; got"),
        ("trainjob", "main env 0", {"name": "A", "value": "$(JAXPAR_RUN_TOKEN)"}, "JAXPAR_RUN_TOKEN after $(JAXPAR_RUN_TOKE"),
        ("service", "main env", [{"name": "A", "value": "$(A)"}], "A after $(A) in spec.template.spec. Move it before."),
        ("service", "pod initContainers", [{"name": "a", "image": "a:1", "command": ["$(B)"]}], "$(B) in spec.template.spec"),
        ("service", "main env", [{"name": "A", "value": "1"}] * 2, "must have each variable once; got A twice. Leave one ou"),
        ("jobset", "main ports metrics containerPort", 6379, "must differ; got containerPort 6379 (TCP) twice. Change one o"),
        ("service", "pod containers +", {"name": "b", "image": "b:1", "ports": [{"containerPort": 8000}]}, "8000 (TCP) twic"),
        ("jobset", "main ports 0 name", "metrics", "must differ; got name metrics twice. Change one of them."),
        ("fake", "main command +", "--metrics-port=6379", "--metrics-port of spec.replicatedJobs.0 must be another"),
        ("fake", "main command +", "--metrics-port=80", "must be from 1024 to 65535, since lower ones are for root"),
        ("monitor", "spec podMetricsEndpoints 0 portNumber", 6379, "must be the number of a named port of the pods; got 637"),
        ("jobset", "main image", None, "the container train of spec.replicatedJobs.0 must name an image; got none. Give one"),
        ("service", "pod initContainers", [{"name": "a"}], "the container a of spec.template.spec must name an image; got n"),
        ("fake", "main env PJRT_NPROC", None, "PJRT_NPROC must be twice JAX_NUM_CPU_DEVICES, or collectives deadlock; got n"),
        ("jobset", "notes prometheus.io/path", "/metric", "prometheus.io/path of spec.replicatedJobs.0 must be /metrics, wh"),
        ("service", "main livenessProbe httpGet", None, "livenessProbe must have one of exec, grpc, httpGet, tcpSocket; got"),
        ("service", "main livenessProbe httpGet", {}, "livenessProbe.httpGet must have port; got none. Write it."),
        ("service", "main readinessProbe httpGet scheme", "HTTPS", "readinessProbe must ask by HTTP, which `jaxpar serve` sp"),
        ("service", "main livenessProbe successThreshold", 2, "successThreshold of a livenessProbe must be 1; got 2 in spec."),
        ("jobset", "main startupProbe", {"exec": {"command": ["true"]}, "successThreshold": 3},
         "successThreshold of a startupProbe must be 1; got 3 in spec.replicatedJobs.0. Leave it out."),
        ("service", "main livenessProbe tcpSocket", {"port": 8000},
         "livenessProbe must have one of exec, grpc, httpGet, tcpSocket; got httpGet and tcpSocket in spec.template.spec. Le"),
        ("trainjob", "main numNodes", 0, "numNodes of spec.trainer must be the number of processes, at least 1; got 0. Writ"),
        ("service", "main lifecycle preStop", {}, "preStop must have one of exec, httpGet, sleep, tcpSocket; got none in sp"),
        ("service", "main lifecycle preStop exec", {}, "exec of preStop in spec.template.spec must have a command; got none"),
        ("jobset", "main livenessProbe", {"exec": {}}, "exec of livenessProbe in spec.replicatedJobs.0 must have a command"),
        ("jobset", "main env POD_IP valueFrom fieldRef fieldPath", "status.hostIP",
         "JAX_COORDINATOR_BIND_ADDRESS of spec.replicatedJobs.0 must be an address of its pod, status.podIP; got POD_IP fro"),
        ("jobset", BOUND, "x$(POD_IP):6379", "an address of its pod, which gets one when it starts; got x$(POD_IP):6379. Wri"),
        ("jobset", BOUND, "10.0.0.7:6379", "it starts; got 10.0.0.7:6379. Write $(POD_IP):PORT, and POD_IP from status.pod"),
        ("jobset", BOUND, "$(POD_IP)$(POD_IP):6379", "an address of its pod, which gets one when it starts; got $(POD_IP)$(PO"),
        ("jobset", "main volumeMounts +", {"name": "a", "mountPath": "/a"}, "volumeMounts of spec.replicatedJobs.0 must be"),
        ("service", "pod initContainers", [{"name": "a", "image": "a:1", "volumeMounts": [{"name": "b", "mountPath": "/b"}]}],
         "volumeMounts of spec.template must be of its volumes; got 'b'. Add the volume, or leave it out."),
        ("jobset", "main env JAX_PROCESS_ID value", "0", "JAX_PROCESS_ID must be the pod's number, metadata.annotations['b"),
        ("monitor", "spec podMetricsEndpoints 0 path", "/metric", "the path of a PodMonitor must be /metrics, where a run h"),
        ("monitor", "spec podMetricsEndpoints 0 port", "9090", "the port of a PodMonitor must be the name of one; got '90"),
        ("service", "metadata namespace", "b", "a Service and its Deployment must have one namespace; got lab and b. Make"),
        ("monitor", "metadata namespace", "b", "a PodMonitor and its JobSet must have one namespace; got b and lab. Make"),
        ("monitor", "spec podMetricsEndpoints 0 port", "web", "must be a named port of the pods; got 'web', which gpt has"),
        ("monitor", "spec podMetricsEndpoints 0 portNumber", 9091, "the portNumber of a PodMonitor must be the number of a"),
        ("monitor", "spec podMetricsEndpoints 0 targetPort", "web", "the targetPort of a PodMonitor must be a named port of"),
        ("monitor", "spec", {"selector": {"matchLabels": {"batch.kubernetes.io/job-completion-index": "0"}},
                             "podMetricsEndpoints": [{"port": "web"}]}, "must be a named port of the pods; got 'web'"),
        ("jobset", "pod volumes +", {"name": "checkpoints", "emptyDir": {}}, "must have different names; got 'checkpoints' tw"),
        ("jobset", "main volumeMounts shm readOnly", True, "the mount at /dev/shm of spec.replicatedJobs.0 must be writable,"),
        ("jobset", "main volumeMounts checkpoints subPathExpr", "$(POD_NAME)", "$(POD_NAME) in spec.replicatedJobs.0 must"),
        ("jobset", COORDINATOR, "gpt-nodes-0-0.gpt-nodes.default.svc.cluster.local:6379",
         "JAX_COORDINATOR_ADDRESS must be in the namespace of the pods, lab; got gpt-nodes-0-0.gpt-nodes.default.svc"),
        ("monitor", "spec selector matchLabels jobset.sigs.k8s.io/jobset-name", "b", "must select a job of its file, gpt; g"),
        ("jobset", "pod hostNetwork", True, "the 2 pods of spec.replicatedJobs.0 must ask the DNS of the cluster, which alon"),
        ("jobset", "pod dnsPolicy", "Default", "got hostNetwork false and dnsPolicy Default, by which they ask that of thei"),
        ("jobset", "spec successPolicy", {"operator": "All", "targetReplicatedJobs": ["workers"]},
         "targetReplicatedJobs of spec.successPolicy must name a job of the file, nodes; got 'workers'. Write one of nodes, o"),
        ("jobset", "spec failurePolicy rules 0 targetReplicatedJobs", ["workers"], "of spec.failurePolicy.rules.0 must name"),
        ("jobset", "spec coordinator", {"replicatedJob": "workers"}, "replicatedJob of spec.coordinator must name a job of"),
        ("jobset", "spec coordinator", {"replicatedJob": "nodes", "podIndex": 2},
         "podIndex of spec.coordinator must be below 2, the number of pods; got 2. Leave it out for the first."),
        ("jobset", "spec replicatedJobs 0 dependsOn", [{"name": "nodes", "status": "Ready"}],
         "dependsOn of spec.replicatedJobs.0 must name a job before it, of which there is none; got 'nodes'. Leave it out."),
        *((kind, "pod volumes checkpoints", {"name": "checkpoints", source: {}},
           f"got /checkpoints/gpt in the volume checkpoints, whose {source} is always read-only. Write a persistentVolumeClai")
          for kind in ("jobset", "trainjob")
          for source in ("configMap", "secret", "projected", "downwardAPI", "image")),
    ],
)  # fmt: skip
def test_what_was_edited_in_one_of_two_places_is_found(kind, place, value, message):
    found = [*documents(kind)]
    edit(found[0], kind, place, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_manifests(found)


def test_ports_of_metrics_and_of_process_0_that_were_made_the_same_everywhere_are_found():
    (job,) = documents("jobset")
    for place in (f"notes {SCRAPED}", "main command --metrics-port"):
        edit(job, "jobset", place, "6379")
    edit(job, "jobset", "main ports", [{"containerPort": 6379, "name": "metrics"}])
    with pytest.raises(
        ValueError,
        match=r"must be another port than process 0's; got 6379, that of JAX_COORDINATOR_ADDRESS, ",
    ):
        check_manifests([job])


@pytest.mark.parametrize("address", ["[$(POD_IP)]", "0.0.0.0", "[::]"])
def test_process_0_may_listen_at_any_address_of_its_pod(address):
    (job,) = documents("jobset")
    edit(job, "jobset", BOUND, f"{address}:6379")
    check_manifests([job])
    edit(job, "jobset", "pod hostNetwork", True)
    edit(job, "jobset", "pod dnsPolicy", "ClusterFirstWithHostNet")
    edit(job, "jobset", BOUND, "10.0.0.7:6379")
    check_manifests([job])


NAMESERVERS = {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["10.0.0.10"]}}


@pytest.mark.parametrize(
    "fields",
    [
        {"dnsPolicy": "ClusterFirstWithHostNet"},
        {"dnsPolicy": "ClusterFirstWithHostNet", "hostNetwork": True},
        NAMESERVERS,
        {**NAMESERVERS, "hostNetwork": True},
    ],
)
def test_pods_may_find_pod_0_by_the_dns_of_the_cluster_in_any_way(fields):
    (job,) = documents("jobset")
    for name, value in fields.items():
        edit(job, "jobset", f"pod {name}", value)
    check_manifests([job])


def test_a_pod_that_is_alone_may_use_the_network_of_its_node():
    (job,) = documents("own")
    edit(job, "own", "pod hostNetwork", True)
    check_manifests([job])


def test_jobs_of_a_file_have_names_of_their_own_and_wait_for_those_before_them():
    (job,) = documents("jobset")
    jobs = job["spec"]["replicatedJobs"]
    jobs.append(copy.deepcopy(jobs[0]))
    with pytest.raises(ValueError, match=r"must have different names; got 'nodes' twice\. Rename"):
        check_manifests([job])
    first, second = jobs
    second["name"] = "more"
    second["dependsOn"] = [{"name": "nodes", "status": "Ready"}]
    for variable in second["template"]["spec"]["template"]["spec"]["containers"][0]["env"]:
        if variable["name"] == "JAX_COORDINATOR_ADDRESS":
            variable["value"] = "gpt-more-0-0.gpt-nodes:6379"
    check_manifests([job])
    first["dependsOn"] = [{"name": "more", "status": "Ready"}]
    with pytest.raises(ValueError, match="must name a job before it, of which there is none; got"):
        check_manifests([job])


def test_the_port_of_a_server_takes_tcp():
    found = [*documents("service")]
    _, service = found
    service["spec"]["ports"][0]["protocol"] = "UDP"
    with pytest.raises(
        ValueError, match="for HTTP must have the protocol TCP; got UDP for port 80"
    ):
        check_manifests(found)
    del service["spec"]["ports"][0]["protocol"]
    edit(found[0], "service", "main ports http protocol", "UDP")
    with pytest.raises(ValueError, match="the port of its pods; got TCP, and UDP for 'http'"):
        check_manifests(found)


def test_a_flag_that_other_parts_depend_on_is_given_once():
    (job,) = documents("jobset")
    job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0][
        "args"
    ] = ["--mesh.data=-1"]
    with pytest.raises(
        ValueError, match=r"must have --mesh.data once; got -1, 4\. Leave one out\."
    ):
        check_manifests([job])


def test_an_axis_of_all_devices_must_divide_them():
    (job,) = documents("jobset")
    edit(job, "jobset", f"notes {SLICE}", "1")
    edit(job, "jobset", "main command --mesh.data", "-1")
    check_manifests([job])
    edit(job, "jobset", "main command --mesh.stage", "3")
    with pytest.raises(
        ValueError,
        match=r"got --mesh.data -1, --mesh.stage 3, --mesh.tensor 2, 6 devices, and 2 pods",
    ):
        check_manifests([job])


def test_pods_without_gpus_or_a_command_are_told_or_taken():
    (job,) = documents("jobset")
    edit(job, "jobset", "main resources", None)
    edit(job, "jobset", "main command", None)
    check_manifests([job])
    assert (
        "spec.replicatedJobs.0 requests no nvidia.com/gpu: pods get no GPUs, unless by another resource"
        in remarks(job)
    )


@pytest.mark.parametrize(
    ("kind", "place", "value", "line"),
    [
        ("jobset", "main env JAXPAR_RESUME", None, "spec.replicatedJobs.0 has no JAXPAR_RESUME: a restarted run does not re"),
        ("jobset", "main env JAXPAR_RESUME value", "true", "spec.replicatedJobs.0 has JAXPAR_RESUME=true: a restarted run"),
        ("jobset", "pod terminationGracePeriodSeconds", 5, "terminationGracePeriodSeconds of spec.replicatedJobs.0 is 5: a"),
        ("jobset", "pod terminationGracePeriodSeconds", None, "terminationGracePeriodSeconds of spec.replicatedJobs.0 is 30"),
        ("jobset", "pod shareProcessNamespace", None, "spec.replicatedJobs.0 has no shareProcessNamespace: a pod that is"),
        ("jobset", "main securityContext capabilities add", [], "rdma/ib and no IPC_LOCK: without this right RDMA may"),
        ("jobset", "job podFailurePolicy rules 1 onExitCodes values", [77], "after a run that was asked to stop and has sav"),
        ("jobset", "spec failurePolicy", None, "spec has no failurePolicy: the first failure, and the first drained node, e"),
        ("jobset", "spec failurePolicy maxRestarts", None, "spec.failurePolicy has no maxRestarts: the first failure ends t"),
        ("jobset", "spec failurePolicy maxRestarts", 0, "spec.failurePolicy has maxRestarts: 0: the first failure ends the"),
        ("jobset", "spec failurePolicy rules 0", None, "exit codes 2, 65, 74, 86 restart the job, though a run that ends wi"),
        ("jobset", "spec failurePolicy rules 0 action", "RestartJobSet", "exit codes 2, 65, 74, 86 restart the job, though"),
        ("jobset", "spec failurePolicy rules 1", None,
         "after a run that was asked to stop and has saved (exit code 75) and after a drained node the restart counts towar"),
        ("jobset", "spec failurePolicy rules 1 action", "FailJobSet",
         "after a run that was asked to stop and has saved (exit code 75) and after a drained node nothing restarts the job"),
        ("jobset", "spec failurePolicy rules 0 onJobFailureReasons", [], ""),
        ("jobset", PATTERNS, ["exit code [0-9]"], "spec.failurePolicy has the pattern 'exit code [0-9]': which exit codes i"),
        ("jobset", PATTERNS, [""], "spec.failurePolicy has the pattern '': which exit codes it matches is not checked, and"),
        ("jobset", PATTERNS, [".*failed with exit code () matching.*"], "spec.failurePolicy has the pattern '.*failed with"),
        ("jobset", PATTERNS, [".*failed with exit code: (2|65|74|86) matching.*"], "spec.failurePolicy has the pattern '.*f"),
        ("jobset", PATTERNS, ["x.*failed with exit code (2|65|74|86) matching.*"], "spec.failurePolicy has the pattern 'x.*"),
        ("jobset", PATTERNS, [".*failed with exit code (86|74|65|2) matching.*"], ""),
        ("jobset", "spec failurePolicy rules +", {"name": "all", "action": "FailJobSet"},
         "after a failure such as a lost process (exit code 70) nothing restarts the job. Write failurePolicy and pod"),
        ("jobset", "job podFailurePolicy rules 2", None, "after a drained node the restart counts towards maxRestarts. Writ"),
        ("jobset", "job podFailurePolicy rules 2 onPodConditions 0 status", "False", "after a drained node the restart count"),
        ("jobset", "job podFailurePolicy rules 2 onPodConditions 0 status", None, ""),
        ("jobset", "main command", ["--mesh.data", "4"], "spec.replicatedJobs.0 has no command: the image's own is run, of"),
        ("trainjob", "main image", None, "spec.trainer has no image: that of the runtime is used, which may have neither ja"),
        ("jobset", "main command +", "--overwrite", "the command has --overwrite: JAXPAR_RESUME=if-any, which a job sets, go"),
        ("jobset", "main command +", "--resume", "the command has --resume: in a folder without a checkpoint it ends with ex"),
        ("service", "main startupProbe", None, "the pods have no startupProbe: one that takes long to start is ended by its"),
        ("service", "main livenessProbe", None, "the pods have no livenessProbe: one that hangs is not started again. Write"),
        ("service", "main readinessProbe", None, "the pods have no readinessProbe: requests reach one that is still loading"),
        ("service", "main startupProbe failureThreshold", None, "startupProbe ends a pod that has not loaded its model afte"),
        ("service", "main lifecycle", None, "the pods have no lifecycle.preStop: requests that arrive while a pod is stoppe"),
        ("service", "pod shareProcessNamespace", None, "spec.template has no shareProcessNamespace: a pod that is drained w"),
        ("jobset", "main env JAXPAR_RUN_TOKEN", None, "spec.replicatedJobs.0 has no JAXPAR_RUN_TOKEN: any program that reac"),
        ("jobset", "main env JAXPAR_INITIALIZATION_TIMEOUT", None, "spec.replicatedJobs.0 has no JAXPAR_INITIALIZATION_TIME"),
        ("jobset", "main env JAX_COORDINATOR_BIND_ADDRESS", None, "spec.replicatedJobs.0 has no JAX_COORDINATOR_BIND_ADDRES"),
        ("jobset", "main env JAXPAR_RUN_TOKEN",
         {"name": "JAXPAR_RUN_TOKEN", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}, ""),
        ("own", "pod securityContext fsGroup", None, "spec.replicatedJobs.0 has runAsUser 1000 and no fsGroup: its volumes"),
        ("jobset", "notes prometheus.io/scrape", None, "spec.replicatedJobs.0 has prometheus.io/port and not prometheus.io/"),
        ("service", "main startupProbe periodSeconds", 0, ""),
        *(("jobset", "pod volumes checkpoints", {"name": "checkpoints", kind: source},
           f"--out-dir /checkpoints/gpt is in the volume checkpoints, whose {kind} is {why}")
          for kind, source, why in VOLUMES),
        *(("trainjob", "pod volumes checkpoints", {"name": "checkpoints", kind: source},
           f"--out-dir /checkpoints/gpt is in the volume checkpoints, whose {kind} is {why}")
          for kind, source, why in VOLUMES),
        ("jobset", f"{LIMITS} cpu", "96", "spec.replicatedJobs.0 has a limit of 96 CPU cores: once they are used up"),
        *(("jobset", f"main {probe}", {"httpGet": {"port": 9090, "path": "/metrics"}},
           f"spec.replicatedJobs.0 has a {probe}: a run answers none but requests for metrics, on process 0 and once it tra")
          for probe in ("startupProbe", "livenessProbe", "readinessProbe")),
        ("jobset", "main livenessProbe", {"exec": {"command": ["true"]}}, ""),
        ("jobset", "main lifecycle", {"preStop": {"exec": {"command": ["sleep", "300"]}}},
         "spec.replicatedJobs.0 has lifecycle.preStop: SIGTERM, at which a run saves, comes after it, and its 300 s are part"),
        ("jobset", "main lifecycle", {"preStop": {"sleep": {"seconds": 9}}}, "spec.replicatedJobs.0 has lifecycle.preStop:"),
        ("jobset", "main lifecycle", {"preStop": {"exec": {"command": ["./flush"]}}},
         "spec.replicatedJobs.0 has lifecycle.preStop: SIGTERM, at which a run saves, comes after it, and its time is part"),
        ("service", "pod volumes checkpoints", {"name": "checkpoints", "emptyDir": {}},
         "the folder to serve is /checkpoints/gpt, in the volume checkpoints, which is empty when a pod starts, and no other"),
        ("service", "pod volumes checkpoints", {"name": "checkpoints", "hostPath": {"path": "/data"}}, ""),
        ("service", "main command +", "--allowed-hosts=models.example",
         "--allowed-hosts has models.example and not gpt, the name of the Service: requests from inside the cluster get 421"),
        ("service", "main command +", "--allowed-hosts=gpt.example", ""),
        ("service", "main command +", "--allowed-hosts=*", ""),
        ("service", "main resources", None, "spec.template requests no resources: a pod gets no GPU, and neither cores nor"),
        ("service", "main resources", {"limits": {"memory": "8Gi"}}, "spec.template requests no cpu: where its node is busy"),
        ("service", f"{REQUESTS} cpu", 0, "spec.template requests no cpu: where its node is busy a pod gets almost no cores"),
        ("service", "main resources", {"limits": {"cpu": 2}}, "spec.template requests no memory: none is kept for a pod, whi"),
        ("service", "spec replicas", 0, "spec.replicas is 0: there are no pods, and requests reach none. Write 1, unless"),
        ("service", "main readinessProbe successThreshold", 2, ""),
        ("trainjob", "pod terminationGracePeriodSeconds", None,
         "terminationGracePeriodSeconds of spec.trainer is 30, unless the runtime sets it: a drained pod has no longer to s"),
        ("trainjob", "pod terminationGracePeriodSeconds", 5, "terminationGracePeriodSeconds of spec.trainer is 5: a drained"),
        ("trainjob", "pod terminationGracePeriodSeconds", 0, "terminationGracePeriodSeconds of spec.trainer is 0: a drained"),
        ("trainjob", f"{PATCHED} name", "nodes", "spec.runtimePatches changes the job nodes: in the runtimes of Trainer the"),
        ("trainjob", "pod containers 0 name", "xnode", "spec.runtimePatches changes the container xnode: in the runtimes of"),
        ("trainjob", "pod volumes", [], "spec.runtimePatches mounts checkpoints, compiled, shm and has no such volumes: wit"),
        ("trainjob", "pod volumes shm", None, "spec.runtimePatches mounts shm and has no such volumes: without those of the"),
        ("trainjob", "main env JAXPAR_RUN_TOKEN", None, "spec.trainer has no JAXPAR_RUN_TOKEN, unless the runtime sets it:"),
        ("trainjob", "main env JAXPAR_RUN_TOKEN value", "", "spec.trainer has no JAXPAR_RUN_TOKEN, unless the runtime sets"),
        ("jobset", "main env JAXPAR_RUN_TOKEN value", "", "spec.replicatedJobs.0 has no JAXPAR_RUN_TOKEN: any program that"),
        ("trainjob", "main envFrom", [{"secretRef": {"name": "a"}}], ""),
        ("jobset", "main command --out-dir", "/checkpoints/$(POD_IP)",
         "--out-dir /checkpoints/$(POD_IP) has $(POD_IP), status.podIP, which differs between pods: they write to different"),
        ("jobset", "main command --out-dir", "/checkpoints/$(JAX_PROCESS_ID)",
         "--out-dir /checkpoints/$(JAX_PROCESS_ID) has $(JAX_PROCESS_ID), metadata.annotations['batch.kubernetes.io/job-c"),
        ("jobset", "main volumeMounts checkpoints subPathExpr", "$(POD_IP)", "subPathExpr $(POD_IP) has $(POD_IP), status.p"),
        ("jobset", "main command --out-dir", "/checkpoints/$(JAX_COORDINATOR_BIND_ADDRESS)",
         "--out-dir /checkpoints/$(JAX_COORDINATOR_BIND_ADDRESS) has $(POD_IP), status.podIP, which differs between pods"),
        ("jobset", "main command --out-dir", "/checkpoints/$(JAX_NUM_PROCESSES)", ""),
        ("jobset", COORDINATOR, "gpt-nodes-0-0.gpt-nodes.lab.svc.cluster.local:6379", ""),
        ("jobset", "job podFailurePolicy rules 2 action", "Ignore",
         "podFailurePolicy has Ignore for a drained node: the pod is then replaced alone, though the others have lost it"),
        ("jobset", "job podFailurePolicy rules 1 action", "Ignore", "podFailurePolicy has Ignore for exit codes In [75]: the"),
        ("jobset", "main command +", "--steps=8",
         "the command has --checkpoint-every 9 and --steps 8: a recipe then saves only at its end or when asked to stop"),
        ("jobset", "main command +", "--steps=10", ""),
        ("trainjob", "spec runtimeRef name", "torch-distributed", "spec.runtimeRef is torch-distributed: a run needs the var"),
        ("jobset", "main securityContext readOnlyRootFilesystem", True, "spec.replicatedJobs.0 has readOnlyRootFilesystem an"),
        ("jobset", "main env JAXPAR_RUN_TOKEN", {"name": "JAXPAR_RUN_TOKEN", "valueFrom": OF_POD},
         "JAXPAR_RUN_TOKEN of spec.replicatedJobs.0 is metadata.uid, another of each pod: process 0 refuses the others"),
        ("jobset", "main resources", {"limits": {GPU: 8, "rdma/ib": 0}, "requests": {GPU: 8, "rdma/ib": 0}},
         "2 nodes and no --rdma: NCCL uses TCP between pods"),
        ("trainjob", "main numNodes", None, "spec.trainer has no numNodes: the runtime's number of nodes may not be that of"),
        ("jobset", "pod securityContext runAsUser", None, "rdma/ib and no runAsUser: the image says which user it is, and on"),
        ("jobset", "pod securityContext", None, "rdma/ib and no runAsUser: the image says which user it is, and only root ge"),
        ("trainjob", "pod securityContext", None, "rdma/ib and no runAsUser, unless the runtime sets it: the image says whi"),
        ("jobset", "main securityContext", {"privileged": True}, ""),
        ("jobset", f"{REQUESTS} cpu", "96m", "spec.replicatedJobs.0 requests 96m CPU, 0.096 of a core, for 8 GPUs a pod: wher"),
        ("jobset", "job activeDeadlineSeconds", 5400,
         "activeDeadlineSeconds of spec.replicatedJobs.0 is 5400: a run that takes longer is ended 1.5 h after its start, whi"),
        ("jobset", "pod activeDeadlineSeconds", 5400, "activeDeadlineSeconds of the pods of spec.replicatedJobs.0 is 5400: a"),
        ("trainjob", "spec activeDeadlineSeconds", 5400, "activeDeadlineSeconds of spec is 5400: a run that takes longer is e"),
        ("jobset", "main command +", "--token-cache=/tokens",
         "the command has --token-cache /tokens, which no claim holds: each start makes the tokens again, unless the image ha"),
        ("jobset", "main command +", "--token-cache=/checkpoints/tokens", ""),
        *(("jobset", "main resources", {of: {GPU: 8, name: 8} for of in ("limits", "requests")},
           "2 nodes and no --rdma: NCCL uses TCP between pods")
          for name in ("amd.com/gpu", "nvidia.com/mig-1g.10gb", "habana.ai/gaudi")),
        ("jobset", "main resources", {of: {GPU: 8, "nvidia.com/rdma_a": 8} for of in ("limits", "requests")}, ""),
    ],
)  # fmt: skip
def test_what_an_edit_takes_from_a_run_is_told(kind, place, value, line):
    job = next(iter(documents(kind)))
    assert not remarks(job)
    edit(job, kind, place, value)
    check_manifests([job])
    said = remarks(job)
    assert len(said) == bool(line)
    assert all(each.startswith(line) for each in said)


def test_pods_with_rdma_whose_user_is_left_to_the_image_are_told_what_to_write():
    (job,) = documents("jobset")
    edit(job, "jobset", "pod securityContext", {"runAsNonRoot": True})
    check_manifests([job])
    (line,) = remarks(job)
    remedy = "Write runAsUser: 0 in the securityContext of the pod, and leave runAsNonRoot out"
    assert line.endswith(remedy)
    edit(job, "jobset", "pod securityContext", {"runAsUser": 0})
    check_manifests([job])
    assert not remarks(job)


def test_a_folder_of_results_is_looked_for_from_the_working_dir():
    (job,) = documents("jobset")
    edit(job, "jobset", "main command --out-dir", "gpt")
    (lost,) = remarks(job)
    assert lost.startswith("the command has --out-dir gpt and the claim is mounted at")
    edit(job, "jobset", "main workingDir", "/checkpoints")
    edit(job, "jobset", "main command 2", "/jaxpar/recipes/gpt.py")
    check_manifests([job])
    assert not remarks(job)
    edit(job, "jobset", "main volumeMounts checkpoints readOnly", True)
    with pytest.raises(ValueError, match="must be writable; got gpt in a volume with readOnly"):
        check_manifests([job])


def test_a_coordinator_is_one_of_as_many_jobs_as_there_are_replicas():
    (job,) = documents("jobset")
    nodes = job["spec"]["replicatedJobs"][0] | {"replicas": 2}
    of_index = lambda index: {"replicatedJob": "nodes", "jobIndex": index}
    named = lambda index: {"replicatedJobs": [nodes], "coordinator": of_index(index)}
    check_jobs(named(1))
    with pytest.raises(
        ValueError,
        match=r"jobIndex of spec\.coordinator must be below 2, the number of replicas; got 2",
    ):
        check_jobs(named(2))


def test_less_memory_than_pods_may_use_is_told():
    (job,) = documents("jobset")
    assert not remarks(job)
    edit(job, "jobset", "main resources requests memory", "8Gi")
    (said,) = remarks(job)
    assert "requests memory 8Gi and may use" in said


def test_a_recipe_that_is_looked_for_in_a_volume_is_told():
    (job,) = documents("jobset")
    edit(job, "jobset", "main workingDir", "/jaxpar")
    assert not remarks(job)
    edit(job, "jobset", "main workingDir", "/checkpoints/code")
    (moved,) = remarks(job)
    assert moved.startswith(
        "spec.replicatedJobs.0 has workingDir /checkpoints/code, in a volume, and the command names recipes/gpt.py"
    )


def test_a_part_of_a_volume_for_each_pod_is_told_with_what_to_write_in_its_place():
    (job,) = documents("jobset")
    edit(job, "jobset", "main volumeMounts checkpoints subPathExpr", "$(POD_IP)")
    (said,) = remarks(job)
    assert said.endswith("does not find whole checkpoints. Leave it out, or write subPath")


@pytest.mark.parametrize(
    "around", ["tini --", "timeout -k 9 3h", "nohup", "nsys profile -o report", "env A=1"]
)
def test_flags_are_read_behind_the_programs_around_a_recipe(around):
    (job,) = documents("jobset")
    words = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    command = words["containers"][0]["command"]
    edit(job, "jobset", "main command", [*around.split(), *command])
    assert not remarks(job)
    edit(job, "jobset", "main command +", "--dry-run")
    (said,) = remarks(job)
    assert said.startswith("the command has --dry-run: the job trains nothing")


def test_a_service_without_an_address_maps_no_port():
    deployment, service = documents("service")
    check_manifests([deployment, service])
    assert not remarks(service)
    edit(service, "service", "spec clusterIP", "None")
    (said,) = remarks(service)
    assert said.startswith("spec.clusterIP is None: clients reach the pods themselves, at their")


@pytest.mark.parametrize(
    "launcher", ["torchrun", "nohup torchrun", "jaxpar launch", "python3 -m jaxpar launch"]
)
def test_a_launcher_as_the_program_of_a_pod_is_told(launcher):
    (job,) = documents("jobset")
    edit(job, "jobset", "main ports", [{"containerPort": 6379}])
    edit(job, "jobset", "notes", {SCRAPED: None})
    edit(job, "jobset", "main command", [*launcher.split(), "train.py"])
    said = [line for line in remarks(job) if "starts processes" in line]
    assert len(said) == 1
    assert (
        f"begins with {launcher.removeprefix('nohup ')}, which starts processes of its own: a pod is one"
        in said[0]
    )


def test_a_file_may_have_lists_and_documents_of_other_kinds(tmp_path, capsys):
    (job,) = documents("jobset")
    other = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"a": "b"}}
    path = tmp_path / "job.yaml"
    for found in ([other, job], [{"apiVersion": "v1", "kind": "List", "items": [job, other]}]):
        path.write_text(yaml.safe_dump_all(found))
        main(["--check", str(path)])
        assert capsys.readouterr().err == "of kind ConfigMap nothing is checked\n"
    edit(job, "jobset", "metadata name", "A")
    path.write_text(yaml.safe_dump_all([other, job]))
    with pytest.raises(ValueError, match=r"document 2: metadata\.name must be a host name's label"):
        main(["--check", str(path)])
    path.write_text(yaml.safe_dump_all([other, {**other, "kind": "JobSets"}]))
    with pytest.raises(
        ValueError, match=r"document 2: .* got kind JobSets\. Did you mean JobSet\?"
    ):
        main(["--check", str(path)])
    path.write_text(yaml.safe_dump(other))
    with pytest.raises(
        ValueError, match=r"got kind ConfigMap\. Check a file that has one of these"
    ):
        main(["--check", str(path)])


@pytest.mark.parametrize(
    ("field", "value", "is_right"),
    [
        *(("interval", value, True) for value in ("30s", "1m30s", "0")),
        *(("interval", value, False) for value in ("30", "", "30S")),
        ("scrapeTimeout", "10ms", True),
        ("scrapeTimeout", "10 s", False),
    ],
)
def test_the_times_of_a_monitor_have_units(field, value, is_right):
    monitor = next(
        each for kind in WRITTEN for each in documents(kind) if each["kind"] == "PodMonitor"
    )
    monitor["spec"]["podMetricsEndpoints"][0][field] = value
    if is_right:
        check_manifests([monitor])
        return
    with pytest.raises(ValueError, match=f"{field} must be a number with its unit, as in 30s"):
        check_manifests([monitor])


def test_a_volume_that_an_init_container_fills_may_be_empty():
    deployment = next(iter(documents("service")))
    edit(deployment, "service", "pod volumes checkpoints", {"name": "checkpoints", "emptyDir": {}})
    mounts = [{"name": "checkpoints", "mountPath": "/checkpoints"}]
    init = {"name": "fetch", "image": "a:1", "command": ["fetch"], "volumeMounts": mounts}
    edit(deployment, "service", "pod initContainers", [init])
    check_manifests([deployment])
    assert not remarks(deployment)


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_an_empty_queue_is_none(kind):
    (job,) = documents(kind)
    edit(job, kind, "metadata labels kueue.x-k8s.io/queue-name", "")
    check_manifests([job])
    with_empty = remarks(job)
    edit(job, kind, "metadata labels", {})
    assert with_empty == remarks(job)
    assert with_empty[0].startswith("--topology or --replica-topology, and no --queue")


def test_a_variable_of_an_empty_value_hides_gpus():
    (job,) = documents("jobset")
    edit(job, "jobset", "main env +", {"name": "CUDA_VISIBLE_DEVICES", "value": ""})
    (line,) = remarks(job)
    assert line.startswith(
        "spec.replicatedJobs.0 has CUDA_VISIBLE_DEVICES=, and the device plugin says which"
    )


def test_adapters_of_random_weights_are_told():
    (job,) = documents("jobset")
    edit(job, "jobset", "main command +", "--lora-rank=8")
    (said,) = remarks(job)
    assert "has --lora-rank and no --init-from: the weights beside the factors are random" in said
    edit(job, "jobset", "main command +", "--init-from=/checkpoints/llama")
    assert not remarks(job)


def test_a_server_whose_metrics_prometheus_does_not_find_is_told():
    deployment, _ = documents("service")
    assert not remarks(deployment)
    edit(deployment, "service", "notes prometheus.io/scrape", "yes")
    (said,) = remarks(deployment)
    assert "has prometheus.io/port and not prometheus.io/scrape" in said


def test_a_label_of_a_run_that_is_made_of_nothing_is_told():
    (monitor, _) = documents("monitor")
    assert not remarks(monitor)
    edit(monitor, "monitor", "spec podMetricsEndpoints 0 relabelings 0 sourceLabels", None)
    (said,) = remarks(monitor)
    assert "spec.podMetricsEndpoints.0 makes no label run" in said
    edit(monitor, "monitor", "spec podMetricsEndpoints 0 relabelings 0 replacement", "gpt")
    assert not remarks(monitor)


def test_the_patch_of_the_job_that_trains_is_read_wherever_it_is():
    (job,) = documents("trainjob")
    other = {"name": "dataset-initializer", "template": {"spec": {"template": {"spec": {}}}}}
    job["spec"]["runtimePatches"].insert(
        0,
        {
            "manager": "example.com/a",
            "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [other]}}},
        },
    )
    check_manifests([job])
    assert not remarks(job)


def test_pods_with_no_memory_to_share_and_no_queue_are_told():
    (job,) = documents("jobset")
    edit(job, "jobset", "main volumeMounts", [])
    edit(job, "jobset", "pod volumes", [])
    edit(job, "jobset", "metadata labels", {})
    edit(job, "jobset", "pod shareProcessNamespace", None)
    edit(job, "jobset", "main command", ["/usr/bin/tini", "--", "python", "mine.py"])
    edit(job, "jobset", "notes", {})
    edit(job, "jobset", "main env JAX_COMPILATION_CACHE_DIR", None)
    edit(job, "jobset", "main ports", [{"containerPort": 6379}])
    check_manifests([job])
    memory, gang = remarks(job)
    assert memory.startswith(
        "spec.replicatedJobs.0 has nothing at /dev/shm: NCCL needs more than the usual 64 MiB there for 8"
    )
    assert gang.startswith(
        "2 pods and no --queue: some may start, hold their GPUs and wait for the rest"
    )


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (
            "JAX_PLATFORMS",
            "cpu",
            "spec.replicatedJobs.0 has JAX_PLATFORMS=cpu and 8 GPUs a pod: the program does not use",
        ),
        (
            "CUDA_VISIBLE_DEVICES",
            "0",
            "spec.replicatedJobs.0 has CUDA_VISIBLE_DEVICES=0, and the device plugin says which",
        ),
        (
            "JAX_PLATFORM_NAME",
            "cpu",
            "spec.replicatedJobs.0 has JAX_PLATFORM_NAME=cpu and 8 GPUs a pod: the program does not",
        ),
        ("JAX_PLATFORMS", "cuda,cpu", None),
        ("NVIDIA_VISIBLE_DEVICES", "all", None),
    ],
)
def test_a_variable_that_keeps_a_program_from_its_gpus_is_told(name, value, line):
    (job,) = documents("jobset")
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["containers"][0]["env"].append({"name": name, "value": value})
    said = remarks(job)
    assert len(said) == (line is not None)
    assert all(each.startswith(line) for each in said)
    deployment, _ = documents("service")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    container.setdefault("env", []).append({"name": name, "value": value})
    of_gpus = [each for each in remarks(deployment) if f" has {name}={value}" in each]
    assert len(of_gpus) == (line is not None), "of a server too"


def test_a_job_that_nothing_starts_or_ends_is_told():
    (job,) = documents("jobset")
    job["spec"]["suspend"] = True
    assert not remarks(job), "Kueue starts it"
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["containers"].append({"name": "logs", "image": "a:1"})
    (endless,) = remarks(job)
    assert endless.startswith(
        "spec.replicatedJobs.0 has the container logs beside the run: the pod ends when all containe"
    )
    del job["metadata"]["labels"]
    assert (
        "spec.suspend is true and there is no --queue: the job does not start. Leave it out, or name the queue"
        in (remarks(job))
    )


def test_metrics_of_which_pods_say_nothing_are_told():
    (job,) = documents("fake")
    words = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][
        0
    ]["command"]
    words += ["--metrics-port", "9099"]
    check_manifests([job])
    assert any(
        line.startswith("the command has --metrics-port 9099, and the pods say nothing of it")
        for line in remarks(job)
    )


def test_two_manifests_of_one_name_are_refused():
    (job,) = documents("jobset")
    with pytest.raises(
        ValueError, match="a file may have one JobSet of a name; got two named 'gpt'"
    ):
        check_manifests([job, job])


def test_a_hostile_pattern_is_read_and_not_run():
    """One with nested repetitions would take longer than the universe has."""
    (job,) = documents("jobset")
    rule = job["spec"]["failurePolicy"]["rules"][0]
    rule["onJobFailureMessagePatterns"] = [
        ".*failed with exit code (" + "(a+)+" * 50 + "|2|65|74|86) matching.*"
    ]
    check_manifests([job])


def test_inputs_of_a_recipe_that_no_volume_holds_are_told():
    (job,) = documents("jobset")
    words = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][
        0
    ]["command"]
    words += [
        "--data",
        "recipes/data/chats.jsonl",
        "/checkpoints/rows",
        "--tokenizer",
        "/checkpoints/gpt2",
    ]
    assert not remarks(job)
    words += ["--init-from", "../qwen", "--data", "/checkpoints/a", "/checkpoints/../mine.jsonl"]
    (said,) = remarks(job)
    assert said.startswith(
        "the recipe reads --init-from ../qwen, --data /checkpoints/../mine.jsonl, which no claim holds"
    )
    assert said.endswith("give the path there: --init-from /checkpoints/qwen")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "JAXPAR_INITIALIZATION_TIMEOUT",
            "-5",
            "must be a number of seconds above 0; got '-5'. Give such as 300.",
        ),
        (
            "JAXPAR_INITIALIZATION_TIMEOUT",
            "soon",
            "must be a number of seconds above 0; got 'soon'. Give such as 300.",
        ),
        (
            "JAXPAR_LOG_SECONDS",
            "-1",
            "or JAXPAR_LOG_SECONDS, must be a number of seconds, 0 or more; got -1. Choose 15",
        ),
        (
            "JAXPAR_RESUME",
            "yes",
            "JAXPAR_RESUME must be if-any or not set; got 'yes'. Set it to if-any for a run",
        ),
        (
            "JAXPAR_RESUM",
            "if-any",
            "must be those that jaxpar reads; got JAXPAR_RESUM. Did you mean JAXPAR_RESUME?",
        ),
        ("JAXPAR_LOG_SECONDS", "$(POD_IP)", ""),
    ],
)
def test_a_variable_at_which_a_run_would_end_is_refused(tmp_path, name, value, message):
    (job,) = documents("jobset")
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    env = [each for each in pod["containers"][0]["env"] if each["name"] != name]
    pod["containers"][0]["env"] = [*env, {"name": name, "value": value}]
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    if not message:
        main(["--check", str(file)])
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        main(["--check", str(file)])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--batch-size", "2"],
            "microbatch of each replica must have a row; got --mesh.data 4, 4 microbatches, --b",
        ),
        (
            ["--steps", "5", "--steps=9"],
            "--steps must be given once; got --steps 5 and --steps 9. Leave all but one out.",
        ),
        (["--batch-size", "4096"], ""),
        (["--model", "llama3.2-1b"], ""),
    ],
)
def test_flags_of_the_command_of_a_manifest_are_checked_as_before_it_is_written(
    tmp_path, capsys, flags, message
):
    (job,) = documents("jobset")
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["containers"][0]["command"] += flags
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    try:
        main(["--check", str(file)])
    except (ValueError, SystemExit) as error:
        said = f"{error}{capsys.readouterr().err}"
        assert message
        assert message in said
    else:
        assert not message


def test_a_model_with_a_vocabulary_needs_data_in_its_manifest(tmp_path):
    """Without them its run would read the source of Python's standard library as bytes, and end at once."""
    (job,) = documents("jobset")
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    at = command.index("--data")
    command[at : at + 2] = ["--model", "llama3.2-1b"]
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    message = "--model llama3.2-1b reads tokens of a vocabulary of 128256; got the source of Python"
    with pytest.raises(ValueError, match=re.escape(message)):
        main(["--check", str(file)])


def test_a_job_without_pods_is_refused():
    job = next(iter(documents("jobset")))
    for count in ("parallelism", "completions"):
        edit(job, "jobset", f"job {count}", 0)
    edit(job, "jobset", "main env JAX_NUM_PROCESSES value", "0")
    with pytest.raises(ValueError, match=r"parallelism of spec\.replicatedJobs\.0 must be the num"):
        check_manifests([job])
