"""Jobs that JobSet's webhook, Kubeflow's Trainer or the API of Jobs would refuse, and those that need more of a cluster."""

import copy
import re

import pytest

from jaxpar.jobs import check_manifests, remarks
from tests.support.written_manifests import SLICE, documents, edit

JOB = "spec replicatedJobs 0"
RULES = "job podFailurePolicy rules"
FAILURE = "spec failurePolicy"
CLAIM = {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Ti"}}}}
PATCH = "spec runtimePatches 0"
ROOT = "kueue.x-k8s.io/podset"
REQUIRED, PREFERRED = (f"{ROOT}-{how}-topology" for how in ("required", "preferred"))


def claims(*names, **policy):
    """Returns volumeClaimPolicies with a claim of each name."""
    return [{"templates": [{"metadata": {"name": name}, **CLAIM} for name in names], **policy}]


@pytest.mark.parametrize(
    ("kind", "place", "value", "message"),
    [
        ("jobset", f"{JOB} dependsOn", [], "dependsOn of spec.replicatedJobs.0, the first job, must be missing; got an empty"),
        ("jobset", f"{JOB} groupName", "1st", "groupName must be lower-case letters, digits and -, a letter first, at most 63"),
        ("jobset", f"{JOB} groupName", "", "groupName must be lower-case letters, digits and -, a letter first, at most 63 lo"),
        ("jobset", "spec network subdomain", "1st", "subdomain must be lower-case letters, digits and -, a letter first, at m"),
        ("jobset", "spec managedBy", "kueue", "managedBy must be a domain and a name, as in example.com/name, at most 63 long"),
        ("jobset", f"{FAILURE} restartStrategy", "InPlaceRestart", "must make new pods, Recreate or BlockingRecreate; got InP"),
        ("jobset", "spec scheduling", {"schedulingPolicy": {"gang": {"minCount": 3}}},
         "minCount of spec.scheduling must be the number of pods, 2, which wait for one another; got 3. Leave it out."),
        ("jobset", "spec scheduling", {"schedulingPolicy": {"gang": {"minCount": 1}}}, "must be the number of pods, 2, which "),
        ("jobset", "spec volumeClaimPolicies", claims("data"), "must be mounted; got 'data', which no container mounts. Moun"),
        ("jobset", "spec volumeClaimPolicies", claims("shm"), "the volumes of pods must have different names; got 'shm' twic"),
        ("jobset", "spec volumeClaimPolicies", claims("a", "a"), "the volumes of pods must have different names; got 'a' twic"),
        ("jobset", "spec volumeClaimPolicies", claims("A"), "spec.volumeClaimPolicies.0.templates.0.metadata.name must be lo"),
        ("jobset", "job backoffLimitPerIndex", 0, "are restarted together, not alone; got backoffLimitPerIndex 0. Leave"),
        ("jobset", "job maxFailedIndexes", 1, "are restarted together, not alone; got maxFailedIndexes 1. Leave it out."),
        ("jobset", "job manualSelector", True, "manualSelector of spec.replicatedJobs.0 must be missing, since the Job"),
        ("jobset", "job podReplacementPolicy", "TerminatingOrFailed", "must be Failed beside podFailurePolicy; got Termi"),
        ("jobset", f"{RULES} 1 action", "FailIndex", "must end all pods, since they are restarted together; got FailIndex. Wr"),
        ("jobset", f"{RULES} 1 onPodConditions", [{"type": "DisruptionTarget"}], "must have onExitCodes or onPodConditions; g"),
        ("jobset", f"{RULES} 2 onPodConditions", [], "must have onExitCodes or onPodConditions; got none. Write one of the tw"),
        ("jobset", f"{RULES} 1 onExitCodes values", [75, 70], "must be in ascending order, each once; got [75, 70]. Sort them"),
        ("jobset", f"{RULES} 1 onExitCodes values", [75, 75], "must be in ascending order, each once; got [75, 75]. Sort them"),
        ("jobset", f"{RULES} 1 onExitCodes values", [0, 75], "must be those of failures; got 0, by which a pod succeeds. Leav"),
        ("jobset", f"notes {ROOT}-slice-required-topology", "a rack", "must be the label of a node, as in example.com/rack; g"),
        ("jobset", f"notes {SLICE}", "3", "must be from 1 to the number of pods, 2; got 3 in spec.replicatedJobs.0. Correct i"),
        ("jobset", f"notes {SLICE}", "0", "must be from 1 to the number of pods, 2; got 0 in spec.replicatedJobs.0. Correct i"),
        ("jobset", "pod hostPID", True, "may have hostPID or shareProcessNamespace; got both. Leave hostPID out."),
        ("trainjob", f"{PATCH} manager", "me", "spec.runtimePatches.0.manager must be a domain and a name, as in example.com"),
        ("trainjob", "spec managedBy", "example.com/own", "managedBy of a TrainJob must be trainer.kubeflow.org/trainjob-con"),
        ("trainjob", "spec initializer", {"dataset": {"storageUri": "/data"}}, "must be a place with its scheme, as in hf://"),
    ],
)  # fmt: skip
def test_what_the_cluster_would_refuse_is_refused_before(kind, place, value, message):
    (job,) = documents(kind)
    edit(job, kind, place, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_manifests([job])


def test_pods_have_one_topology():
    (job,) = documents("jobset")
    for number, name in enumerate((REQUIRED, PREFERRED)):
        edit(job, "jobset", f"notes {name}", "example.com/rack")
        if not number:
            check_manifests([job])
    with pytest.raises(ValueError, match=r"must have one of kueue.*; got 2 in spec"):
        check_manifests([job])


def test_a_job_has_at_most_20_rules_about_failed_pods():
    (job,) = documents("jobset")
    rules = job["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    rules += [copy.deepcopy(rules[-1]) for _ in range(20 - len(rules))]
    check_manifests([job])
    rules.append(copy.deepcopy(rules[-1]))
    with pytest.raises(ValueError, match=r"must have at most 20 rules; got 21\. Write several"):
        check_manifests([job])


def test_jobs_wait_for_one_another_in_one_way():
    (job,) = documents("jobset")
    jobs = job["spec"]["replicatedJobs"]
    jobs.append(copy.deepcopy(jobs[0]) | {"name": "more"})
    jobs[1]["dependsOn"] = [{"name": "nodes", "status": "Ready"}]
    job["spec"]["startupPolicy"] = {"startupPolicyOrder": "InOrder"}
    with pytest.raises(ValueError, match=r"may have dependsOn or startupPolicy InOrder; got both"):
        check_manifests([job])


def test_the_address_of_a_coordinator_is_one_that_a_label_takes():
    (job,) = documents("jobset")
    edit(job, "jobset", "spec coordinator", {"replicatedJob": "nodes", "podIndex": 1})
    check_manifests([job])
    edit(job, "jobset", "spec network subdomain", "a" * 50)
    with pytest.raises(ValueError, match=r"at most 63 long; got 'gpt-nodes-0-1\.a{50}', 64\. Shor"):
        check_manifests([job])


def test_claims_that_a_job_set_makes_are_volumes_of_its_pods():
    (job,) = documents("jobset")
    assert not remarks(job)
    edit(job, "jobset", "pod volumes checkpoints", None)
    with pytest.raises(ValueError, match="must be of its volumes; got 'checkpoints'"):
        check_manifests([job])
    edit(job, "jobset", "spec volumeClaimPolicies", claims("checkpoints"))
    check_manifests([job])
    (said,) = remarks(job)
    assert "deletes checkpoints with the JobSet, and what is in it. Write retentionPolicy" in said
    kept = claims("checkpoints", retentionPolicy={"whenDeleted": "Retain"})
    edit(job, "jobset", "spec volumeClaimPolicies", kept)
    check_manifests([job])
    assert not remarks(job)
    edit(job, "jobset", "main volumeMounts +", {"name": "other", "mountPath": "/other"})
    with pytest.raises(ValueError, match="must be of its volumes; got 'other'"):
        check_manifests([job])


@pytest.mark.parametrize(
    ("kind", "place", "value", "message"),
    [
        ("jobset", "spec managedBy", "kueue.x-k8s.io/multikueue", "the controller of JobSets leaves the job to it, and with"),
        ("trainjob", "spec managedBy", "kueue.x-k8s.io/multikueue", "the controller of TrainJobs leaves the job to it, and "),
        ("jobset", "spec scheduling", {"schedulingPolicy": {"gang": {"minCount": 2}}},
         "spec.scheduling needs the feature gate JobSetWorkloadAwareSchedulingAPI of JobSet's controller"),
        ("jobset", f"{FAILURE} rules 1 action", "RestartJobAndIgnoreMaxRestarts",
         "rules.1 needs the feature gate RestartJob of JobSet's controller, without which the cluster refuses it. Write Restar"
         "tJobSetAndIgnoreMaxRestarts, unless it is on"),
        ("jobset", "job successPolicy", {"rules": [{"succeededCount": 1}]}, "ends the other pods once some have succee"),
        ("jobset", "job ttlSecondsAfterFinished", 0, "deletes a Job that has ended, which its JobSet may make and trai"),
        ("jobset", "spec ttlSecondsAfterFinished", 0, "the JobSet is deleted as it ends, with its pods, their logs and why"),
        ("trainjob", "main env +", {"name": "JAX_PROCESS_ID", "value": "0"}, "spec.trainer.env has JAX_PROCESS_ID: Trainer's"),
        ("jobset", "pod nodeName", "node1", "puts all 2 pods on the node node1, past the scheduler: those for which it has"),
    ],
)  # fmt: skip
def test_what_needs_more_of_a_cluster_or_ends_a_run_early_is_told(kind, place, value, message):
    (job,) = documents(kind)
    before = remarks(job)
    edit(job, kind, place, value)
    check_manifests([job])
    assert [said for said in remarks(job) if message in said and said not in before]


def test_the_manager_that_a_job_has_by_default_may_be_written():
    for kind, of in (
        ("jobset", "jobset.sigs.k8s.io/jobset"),
        ("trainjob", "trainer.kubeflow.org/trainjob"),
    ):
        (job,) = documents(kind)
        before = remarks(job)
        edit(job, kind, "spec managedBy", f"{of}-controller")
        check_manifests([job])
        assert remarks(job) == before


def test_a_train_job_is_patched_once_by_a_manager_and_without_variables():
    (job,) = documents("trainjob")
    patches = job["spec"]["runtimePatches"]
    patches.append({"manager": patches[0]["manager"]})
    with pytest.raises(ValueError, match="must have different managers; got 'jaxpar"):
        check_manifests([job])
    patches.pop()
    (of_job,) = patches[0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    containers = of_job["template"]["spec"]["template"]["spec"]["containers"]
    containers.append({"name": "side", "env": [{"name": "A", "value": "1"}]})
    check_manifests([job])
    containers[0]["env"] = [{"name": "A", "value": "1"}]
    with pytest.raises(ValueError, match=r"must have no env, which Trainer refuses; got A\. Write"):
        check_manifests([job])
