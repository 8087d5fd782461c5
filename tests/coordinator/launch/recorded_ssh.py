"""Outputs of OpenSSH 9.2, sh, Python and macOS when something is wrong; those of ssh were recorded from a real sshd.

FileVault's text is Apple's (apple_ssh_and_filevault); the ones of macOS were not recorded on a Mac of ours.
"""

BANNER = "Property of the office. Authorized use only.\n"

# By the kind of finding: what ssh printed before any command ran, with exit code 255.
SSH_FAILED = (
    ("host key unknown", "Host key verification failed."),
    (
        "host key unknown",
        "No ED25519 host key is known for [10.0.0.2]:2222 and you have requested strict checking.\n"
        "Host key verification failed.",
    ),
    (
        "host key changed",
        "@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@\n"
        "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n"
        "@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@\n"
        "IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!\n"
        "Someone could be eavesdropping on you right now (man-in-the-middle attack)!\n"
        "It is also possible that a host key has just been changed.\n"
        "The fingerprint for the ED25519 key sent by the remote host is\n"
        "SHA256:p8EkjHU5acRxawtXE+OvGen+xo2ZhN9j6xCbcauuz+c.\n"
        "Please contact your system administrator.\n"
        "Add correct host key in /Users/ada/.ssh/known_hosts to get rid of this message.\n"
        "Offending ED25519 key in /Users/ada/.ssh/known_hosts:1\n"
        "  remove with:\n"
        '  ssh-keygen -f "/Users/ada/.ssh/known_hosts" -R "mini-1"\n'
        "Host key for mini-1 has changed and you have requested strict checking.\n"
        "Host key verification failed.",
    ),
    ("permission denied", "ada@mini-1: Permission denied (publickey,password,keyboard-interactive)."),
    ("permission denied", "ada@mini-1: Permission denied (publickey)."),
    (
        "permission denied",
        "Received disconnect from 10.0.0.2 port 22:2: Too many authentication failures\n"
        "Disconnected from 10.0.0.2 port 22",
    ),
    (
        "permission denied",
        "@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@\n"
        "@         WARNING: UNPROTECTED PRIVATE KEY FILE!          @\n"
        "@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@\n"
        "Permissions 0644 for '/Users/ada/.ssh/id_ed25519' are too open.\n"
        "It is required that your private key files are NOT accessible by others.\n"
        "This private key will be ignored.\n"
        'Load key "/Users/ada/.ssh/id_ed25519": bad permissions\n'
        "ada@mini-1: Permission denied (publickey,password,keyboard-interactive).",
    ),
    ("filevault", "ada@mini-1: Permission denied (password)."),
    (
        "filevault",
        "This system is locked. To unlock it, use a local\naccount name and password. Once successfully\n"
        "unlocked, you will be able to connect normally.\n"
        "ada@mini-1: Permission denied (password,keyboard-interactive).",
    ),
    ("unknown name", "ssh: Could not resolve hostname mini-1: Name or service not known"),
    ("unknown name", "ssh: Could not resolve hostname mini-1: nodename nor servname provided, or not known"),
    ("refused", "ssh: connect to host mini-1 port 22: Connection refused"),
    ("local network", "ssh: connect to host mini-1 port 22: No route to host"),
    ("local network", "ssh: connect to host fe80::1%en0 port 22: Network is unreachable"),
    ("unreachable", "ssh: connect to host mini-1 port 22: Operation timed out"),
    ("unreachable", "ssh: connect to host mini-1 port 22: Connection timed out"),
    ("unreachable", "Connection timed out during banner exchange\nConnection to 10.0.0.2 port 22 timed out"),
    (
        "unreachable",
        "kex_exchange_identification: read: Connection reset by peer\nConnection reset by 10.0.0.2 port 22",
    ),
    (
        "refused",
        "ssh: connect to host 10.0.0.9 port 22: Connection refused\n"
        "kex_exchange_identification: Connection closed by remote host\nConnection closed by UNKNOWN port 65535",
    ),
    ("tunnel refused", "Error: remote port forwarding failed for listen port 0"),
    ("unreachable", "something that no version of ssh prints today"),
    ("ssh configuration", "Can't open user config file /none: No such file or directory"),
    ("ssh configuration", "command-line: line 0: Bad configuration option: foo"),
)

# By kind: exit code and standard error of a command that ran on the host.
COMMAND_FAILED = (
    ("interpreter missing", 127, "/Users/ada/mlxdist/env/current/bin/python: not found"),
    ("interpreter missing", 127, "/bin/sh: line 0: exec: /opt/python: cannot execute: No such file or directory"),
    ("interpreter missing", 126, "/bin/sh: /opt/python: Permission denied"),
    ("mlxdist missing", 1, "/usr/bin/python3: No module named mlxdist"),
    ("mlxdist missing", 1, "ModuleNotFoundError: No module named 'mlxdist'"),
    ("mlxdist missing", 1, "importlib.metadata.PackageNotFoundError: No package metadata was found for mlx-lm"),
    ("privacy", 1, "mkdir: /Users/ada/Documents/mlxdist: Operation not permitted"),
    ("privacy", 1, "/bin/sh: line 0: cd: /Volumes/Models/mlxdist: Operation not permitted"),
    ("privacy", 1, "PermissionError: [Errno 1] Operation not permitted: '/Users/ada/Desktop/m/config.json'"),
    ("disk full", 1, "mkdir: /Users/ada/mlxdist: No space left on device"),
    ("disk full", 1, "OSError: [Errno 28] No space left on device: '/Users/ada/mlxdist/x'"),
    (
        "port blocked",
        75,
        "mlxdist node: no coordinator for 300 s; cannot reach the coordinator at 10.0.0.1:5555: timed out",
    ),
    (
        "local network",
        75,
        "mlxdist node: no coordinator for 300 s; cannot reach the coordinator at 10.0.0.1:5555: "
        "[Errno 65] No route to host",
    ),
    (
        "local network",
        75,
        "mlxdist node: no coordinator for 300 s; cannot reach the coordinator at 10.0.0.1:5555: "
        "[Errno 113] No route to host",
    ),
    ("no metal", 1, "RuntimeError: [metal::load_device] No Metal device available."),
    ("model missing", 1, "model '/Users/ada/m' cannot be loaded: No such file or directory"),
    ("model differs", 1, "mini-2: its model differs from the first node's"),
)

MAC_LOOK = """user ada
home /Users/ada lovelace
system Darwin
machine arm64
address fe80::1c2d:ff%en0
release 15.3.1
chip Apple M4
bytes 17179869184
other 812 /Users/ada/mlxdist/env/current/bin/python -u -m mlxdist node --launched --name mini-1 --tag pairs.0a1b2c
model /Users/ada lovelace/mlxdist/models/qwen
version mlxdist 0.1.0
version mlx 0.32.4
version mlx-lm 0.32.2
"""

LINUX_LOOK = """user ada
home /home of/ada
system Linux
machine x86_64
address 10.0.0.1
release 6.1.0-18-amd64
chip AMD Ryzen 7 5800X 8-Core Processor
kilobytes 32768000
version mlxdist 0.1.0
version mlx 0.32.4
version mlx-lm 0.32.2
"""
