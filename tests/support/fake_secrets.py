"""Forty secrets, made up, each in the words in which such a thing comes along; none may ever be found again."""

from __future__ import annotations

_DIGITS = "".join(str(n % 10) for n in range(7, 47))
_LETTERS = "CanaryAbCdEfGhIjKlMnOpQrStUvWxYz0123456789"

TEXTS: dict[str, tuple[str, str]] = {
    "HF_TOKEN": (f"hf_{_LETTERS[:34]}", "HF_TOKEN={}"),
    "Hugging Face, alone": (f"hf_x{_LETTERS[:33]}", "401 for {} at huggingface.co"),
    "AWS key id": ("AKIACANARYABCDEFGHIJ", "aws: {}"),
    "AWS session": ("ASIACANARYABCDEFGHIJ", "credentials of {} are over"),
    "AWS secret": ("c4n4ry/aws+secret/abcdefghijklmnopqrstuv", "AWS_SECRET_ACCESS_KEY={}"),
    "AWS signature": ("c4n4rysignature0123456789", "https://b.s3.example/x?X-Amz-Signature={}&X-Amz-Date=1"),
    "password of a URI": ("pa55canary01", "postgresql://me:{}@db.example/mlflow"),
    "password with an @": ("pa55@canary02", "cannot open https://me:{}@tracking.example:8080/ml"),
    "user of a URI": ("canaryuser03token", "git+ssh://{}@git.example/x.git"),
    "token in a remote": ("canary04remote", "https://oauth2:{}@gitlab.example/group/x.git"),
    "PEM": ("MIIBOgIBAAJBAKcanary05", "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----"),
    "PEM, cut off": ("b3BlbnNzaC1rZXkcanary06", "-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n"),
    "PEM in one line": ("MIIEvcanary07", r"-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----"),
    "JWT": ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJjYW5hcnkifQ.c4n4ry08", "token is {} now"),
    "bearer": ("c4n4rybearer09abc", "Authorization: Bearer {}"),
    "basic": ("Y2FuYXJ5OmNhbmFyeTEw", "Authorization: Basic {}"),
    "header in a dict": ("c4n4ry11headerabc", "{{'Authorization': 'token {}', 'Accept': '*/*'}}"),
    "proxy header": ("Y2FuYXJ5MTI6eA", "Proxy-Authorization: Basic {}"),
    "cookie": ("c4n4ry13session", "Cookie: theme=dark; sessionid={}; lang=en"),
    "cookie that is set": ("c4n4ry14session", "Set-Cookie: a=1; session={}; Path=/"),
    "GitHub": (f"ghp_{_LETTERS[:36]}", "remote: {}"),
    "GitHub, fine": (f"github_pat_{_LETTERS[:40]}", "using {}"),
    "GitLab": ("glpat-c4n4ry16abcdefghij", "{} was refused"),
    "OpenAI": (f"sk-{_LETTERS[:40]}", "Incorrect key provided: {}"),
    "Slack": ("xoxb-c4n4ry-1234567890-abcdef", "post to {}"),
    "PyPI": (f"pypi-{_LETTERS[:40]}", "upload with {}"),
    "npm": (f"npm_{_LETTERS[:36]}", "{}"),
    "Databricks": (f"dapi{_DIGITS[:32]}", "databricks {}"),
    "Google": (f"AIza{_LETTERS[:35]}", "key={}"),
    "Google, OAuth": ("ya29.c4n4ry17-abcdefghijklmnop", "got {}"),
    "Stripe": ("sk_live_c4n4ry18abcdefgh", "charge with {}"),
    "Azure": ("c4n4ry19azure/abcdefghijklmnop==", "DefaultEndpointsProtocol=https;AccountKey={};EndpointSuffix=x"),
    "Azure, shared": ("c4n4ry20sas%2Babcdef", "https://a.blob.example/c?sv=2024&sig={}"),
    "W&B": (_DIGITS, "WANDB_API_KEY={}"),
    "MLflow": ("c4n4ry21mlflow", "MLFLOW_TRACKING_PASSWORD={}"),
    "Postgres": ("c4n4ry22pg", "PGPASSWORD={} psql"),
    "MySQL": ("c4n4ry23my", "MYSQL_PWD={}"),
    "JSON": ("c4n4ry24json", '{{"client_secret": "{}", "id": 3}}'),
    "JSON in JSON": ("c4n4ry25json", r"{{\"api_key\": \"{}\"}}"),
    "YAML": ("c4n4ry26yaml", "hub:\n  token: {}\n"),
    "words of a command": ("c4n4ry27argv", "--password {} --user me"),
    "words with =": ("c4n4ry28argv", "--hub-token={}"),
    "netrc": ("c4n4ry29netrc", "machine api.example login me password {}"),
    "query": ("c4n4ry30query", "GET /v1?access_token={}&page=2"),
    "passphrase": ("c4n4ry31phrase", "passphrase: {}"),
}
"""Of what kind, the secret itself, and a text around it."""
SECRETS = {kind: secret for kind, (secret, _) in TEXTS.items()}
SAID = {kind: text.format(secret) for kind, (secret, text) in TEXTS.items()}


def found_in(content: bytes) -> list[str]:
    """Kinds of the secrets that stand in something."""
    return [kind for kind, secret in SECRETS.items() if secret.encode() in content]
