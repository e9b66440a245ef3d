"""What programs do with the AWS SDK for Python, unmodified, with keys that are worth nothing.

Arguments: the port of the services, the proxy, and the certificate to trust. Prints one line when all went well.
"""

import hashlib
import io
import os
import sys
import tempfile
import urllib.request
import ssl

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

PORT, PROXY, TRUST = sys.argv[1:4]


def client(service, **options):
    return boto3.client(
        service,
        endpoint_url=f"https://{service}.test:{PORT}",
        region_name="eu-test-1",
        aws_access_key_id="AKIADUMMYDUMMYDUMMY0",
        aws_secret_access_key="dummy",
        aws_session_token="dummy-token",
        verify=TRUST,
        config=Config(
            proxies={"https": PROXY},
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path", **options.pop("s3", {})},
            **options,
        ),
    )


def check(what, found, wanted):
    assert found == wanted, f"{what}: {found!r:.200} is not {wanted!r:.200}"


s3 = client("s3")
noise = hashlib.shake_256(b"noise").digest(9 << 20)

# The default of this SDK is a body with a checksum behind it.
s3.put_object(Bucket="b", Key="small", Body=b"hello", Metadata={"two": "a  b"}, ContentType="text/plain")
check("small", s3.get_object(Bucket="b", Key="small")["Body"].read(), b"hello")
s3.put_object(Bucket="b", Key="empty", Body=b"")
check("empty", s3.get_object(Bucket="b", Key="empty")["Body"].read(), b"")
s3.put_object(Bucket="b", Key="large", Body=noise)
check("large", s3.get_object(Bucket="b", Key="large")["Body"].read(), noise)

# A digest in the head, and no digest at all.
plain = client("s3", s3={"payload_signing_enabled": True}, request_checksum_calculation="when_required")
plain.put_object(Bucket="b", Key="digest", Body=noise)
check("digest", plain.get_object(Bucket="b", Key="digest")["Body"].read(), noise)
unsigned = client("s3", s3={"payload_signing_enabled": False}, request_checksum_calculation="when_required")
unsigned.put_object(Bucket="b", Key="unsigned", Body=noise)
check("unsigned", unsigned.get_object(Bucket="b", Key="unsigned")["Body"].read(), noise)


class Pipe(io.RawIOBase):
    """A body that cannot be read twice, and whose length nobody knows."""

    def __init__(self, data):
        self.source = io.BytesIO(data)

    def readable(self):
        return True

    def read(self, size=-1):
        return self.source.read(size)

    def seekable(self):
        return False


s3.put_object(Bucket="b", Key="pipe", Body=Pipe(noise[:300_000]))
check("pipe", s3.get_object(Bucket="b", Key="pipe")["Body"].read(), noise[:300_000])

# In parts, several at once.
with tempfile.NamedTemporaryFile() as file:
    file.write(noise * 2)
    file.flush()
    s3.upload_file(file.name, "b", "parts", Config=TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=6 << 20))
check("parts", s3.get_object(Bucket="b", Key="parts")["Body"].read(), noise * 2)

check("range", s3.get_object(Bucket="b", Key="large", Range="bytes=100-199")["Body"].read(), noise[100:200])

odd = ["a+b", "a b", "ü€😀", "x//y", "x/../y", "./z", "q?#&=%41", "tilde~(1)!*'"]
for key in odd:
    s3.put_object(Bucket="b", Key=f"odd/{key}", Body=key.encode())
    check(key, s3.get_object(Bucket="b", Key=f"odd/{key}")["Body"].read(), key.encode())
listed = [entry["Key"] for entry in s3.list_objects_v2(Bucket="b", Prefix="odd/")["Contents"]]
check("list", sorted(listed), sorted(f"odd/{key}" for key in odd))
check("one", [e["Key"] for e in s3.list_objects_v2(Bucket="b", Prefix="odd/a+")["Contents"]], ["odd/a+b"])

# A presigned URL, for a program that has no keys at all.
context = ssl.create_default_context(cafile=TRUST)
opener = urllib.request.build_opener(
    urllib.request.ProxyHandler({"https": PROXY}), urllib.request.HTTPSHandler(context=context)
)
url = s3.generate_presigned_url("get_object", Params={"Bucket": "b", "Key": "odd/a b"})
assert "X-Amz-Signature" in url and "dummy-token" in url
check("presigned", opener.open(url).read(), b"a b")
url = s3.generate_presigned_url("put_object", Params={"Bucket": "b", "Key": "by-url"})
opener.open(urllib.request.Request(url, data=b"by a URL", method="PUT"))
check("put by URL", s3.get_object(Bucket="b", Key="by-url")["Body"].read(), b"by a URL")
check("anonymous", opener.open(f"https://s3.test:{PORT}/b/small").read(), b"hello")

check("dynamodb", client("dynamodb").list_tables()["TableNames"], ["verified"])
check("sts", client("sts").get_caller_identity()["Account"], "123456789012")
check("sqs", client("sqs").send_message(QueueUrl=f"https://sqs.test:{PORT}/1/q", MessageBody="hällo")["MessageId"], "1")
print("all went well")
