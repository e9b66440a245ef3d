"""The benign traffic that needs a library: `tools.py NAME` runs one function, with the proxy and the trusted roots in
the environment. Some need the SDKs of requirements.txt."""

import asyncio
import base64
import io
import json
import os
import sys
import time

import samples

DATA = samples.Samples("tools")
PROXY = os.environ["HTTPS_PROXY"]
BUNDLE = os.environ["SSL_CERT_FILE"]
ROUNDS = 12

TOOLS = [{"type": "function", "function": {"name": "read_file", "description": "Reads a file.", "parameters": {
    "type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}}]
CODE = "\n".join(f"fn {word}(value: &str) -> usize {{ value.len() + {at} }}" for at, word in enumerate(samples.WORDS))
LOG = "\n".join(f"2024-05-01T12:00:{at:02} INFO request id={DATA.pick(32, '0123456789abcdef')} took 12 ms" for at in range(60))


def picture():
    return base64.b64encode(samples.png(DATA)).decode()


def openai_client():
    import openai
    key = DATA.secret("openai").split("=")[1]
    return openai.OpenAI(api_key=key, base_url="https://api.openai.com/v1", max_retries=0, timeout=20)


def openai_chat():
    client = openai_client()
    messages = [{"role": "system", "content": "You write Rust."}]
    for at in range(ROUNDS):
        messages.append({"role": "user", "content": f"{DATA.prose(300)}\n```\n{CODE}\n```"})
        said = client.chat.completions.create(model="gpt-4o", messages=messages, tools=TOOLS).choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": LOG if at % 2 else CODE})
        said = client.chat.completions.create(model="gpt-4o", messages=messages, tools=TOOLS).choices[0].message
        messages.append({"role": "assistant", "content": said.content})


def openai_vision():
    client = openai_client()
    for _ in range(6):
        content = [{"type": "text", "text": "What is this?"},
                   {"type": "image_url", "image_url": {"url": "data:image/png;base64," + picture()}}]
        client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": content}])


def openai_stream():
    client = openai_client()
    for _ in range(ROUNDS):
        asked = [{"role": "user", "content": DATA.prose(500)}]
        for _ in client.chat.completions.create(model="gpt-4o", messages=asked, stream=True):
            pass


def openai_embeddings():
    client = openai_client()
    for _ in range(30):
        client.embeddings.create(model="e", input=[DATA.prose(400) for _ in range(4)], encoding_format="float")
    client.files.create(file=io.BytesIO(("\n".join(json.dumps({"text": DATA.prose(200)}) for _ in range(300))).encode()),
                        purpose="batch")
    client.responses.create(model="gpt-4o", input=DATA.prose(300))


def anthropic_client():
    import anthropic
    key = DATA.secret("anthropic").split("=")[1]
    return anthropic.Anthropic(api_key=key, base_url="https://anthropic.example", max_retries=0, timeout=20)


def anthropic_tools():
    client = anthropic_client()
    tools = [{"name": "read_file", "description": "Reads a file.", "input_schema": TOOLS[0]["function"]["parameters"]}]
    messages = []
    for at in range(ROUNDS):
        messages.append({"role": "user", "content": DATA.prose(300)})
        said = client.messages.create(model="claude", max_tokens=1024, messages=messages, tools=tools)
        messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in said.content]})
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": LOG if at % 2 else CODE}
                   for block in said.content if block.type == "tool_use"]
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture()}}
        messages.append({"role": "user", "content": [*results, image]})
        messages.append({"role": "assistant", "content": "Thanks."})


def anthropic_stream():
    client = anthropic_client()
    for _ in range(ROUNDS):
        with client.messages.stream(model="claude", max_tokens=1024,
                                    messages=[{"role": "user", "content": DATA.prose(600)}]) as stream:
            for _ in stream.text_stream:
                pass


def s3_client(token=None):
    import boto3
    from botocore.config import Config
    pair = [line.split(" = ")[1] for line in DATA.secret("aws").split("\n")]
    return boto3.client("s3", endpoint_url="https://s3.example", region_name="eu-central-1", aws_access_key_id=pair[0],
                        aws_secret_access_key=pair[1], aws_session_token=token, verify=BUNDLE,
                        config=Config(s3={"addressing_style": "path"}, proxies={"https": PROXY},
                                      retries={"max_attempts": 1}, connect_timeout=10, read_timeout=20))


def s3_multipart():
    from boto3.s3.transfer import TransferConfig
    settings = TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20, max_concurrency=2)
    client = s3_client()
    for at in range(2):
        client.upload_fileobj(io.BytesIO(DATA.bytes(12 << 20)), "backups", f"2024/05/{at}/database.tar.zst", Config=settings)


def s3_objects():
    client = s3_client(DATA.pick(800))
    for at in range(60):
        key = f"runs/{DATA.pick(8, '0123456789abcdef')}-{at}/model-{at}.json"
        client.put_object(Bucket="artifacts", Key=key, Body=DATA.prose(2_000).encode())
        client.get_object(Bucket="artifacts", Key=key)["Body"].read()
    client.list_objects_v2(Bucket="artifacts", Prefix="runs/")


def s3_presigned():
    import requests
    client, session = s3_client(DATA.pick(700)), requests.Session()
    for at in range(30):
        key = f"public/photo-{at}.bin"
        client.put_object(Bucket="media", Key=key, Body=DATA.bytes(30_000))
        session.get(client.generate_presigned_url("get_object", {"Bucket": "media", "Key": key}), timeout=20)


def otel_traces():
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    provider = TracerProvider()
    exporter = OTLPSpanExporter(endpoint="https://otel.example/v1/traces", certificate_file=BUNDLE)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("app")
    for _ in range(40):
        for at in range(10):
            with tracer.start_as_current_span(f"step-{at}", attributes={"http.url": f"https://web.example/{DATA.pick(12)}"}):
                pass
        provider.force_flush(5_000)
        time.sleep(0.1)
    provider.shutdown()


def otel_metrics():
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    exporter = OTLPMetricExporter(endpoint="https://otel.example/v1/metrics", certificate_file=BUNDLE)
    provider = MeterProvider([PeriodicExportingMetricReader(exporter, export_interval_millis=200)])
    counter = provider.get_meter("app").create_counter("requests")
    for at in range(50):
        counter.add(1, {"route": f"/api/{at % 7}"})
        time.sleep(0.1)
    provider.shutdown()


def grpc_calls():
    import grpc
    channel = grpc.secure_channel("grpc.example:8443", grpc.ssl_channel_credentials(open(BUNDLE, "rb").read()))
    echo = channel.unary_unary("/acme.Counter/Echo")
    for _ in range(60):
        identity = (("x-request-id", DATA.pick(32, "0123456789abcdef")), ("authorization", "Bearer fixed-token-of-a-service"))
        echo(DATA.bytes(500), timeout=20, metadata=identity)
    assert len(list(channel.unary_stream("/acme.Counter/Count")(b"100", timeout=20))) == 100


def grpc_stream():
    import grpc
    channel = grpc.secure_channel("grpc.example:8443", grpc.ssl_channel_credentials(open(BUNDLE, "rb").read()))
    for _ in range(5):
        sent = [DATA.bytes(3_000) for _ in range(40)]
        assert list(channel.stream_stream("/acme.Counter/Both")(iter(sent), timeout=20)) == sent


def requests_pages():
    import requests
    session = requests.Session()
    for page in range(1, 121):
        session.get("https://web.example/api/items", params={"page": page, "per_page": 20, "sort": "created"}, timeout=20)


def requests_login():
    import requests
    session = requests.Session()
    session.get("https://web.example/", timeout=20)
    for _ in range(4):
        token = session.post("https://web.example/oauth/token", data={"grant_type": "client_credentials",
                                                                       "client_id": "app-7"}, timeout=20).json()
        for at in range(20):
            session.get(f"https://web.example/api/users/{1000 + at}", timeout=20,
                        headers={"Authorization": "Bearer " + token["access_token"]})


def requests_graphql():
    import requests
    session = requests.Session()
    for at in range(50):
        query = {"query": "query Items($after: String) { items(after: $after) { id title } }",
                 "variables": {"after": base64.b64encode(f"cursor:{at}".encode()).decode()}}
        session.post("https://web.example/api/graphql", json=query, timeout=20)


def searches():
    import httpx
    with httpx.Client(verify=BUNDLE) as client:
        for _ in range(40):
            client.get("https://search.example/search", params={"q": DATA.prose(30), "lang": "en"}, timeout=20)


def aiohttp_many():
    import aiohttp
    import ssl

    async def run():
        context = ssl.create_default_context(cafile=BUNDLE)
        async with aiohttp.ClientSession() as session:
            async def one(at):
                url = f"https://web.example/api/objects/{DATA.pick(8)}-{at}"
                async with session.get(url, proxy=PROXY, ssl=context, headers={"X-Request-Id": DATA.pick(32)}) as answer:
                    await answer.read()
            for start in range(0, 60, 10):
                await asyncio.gather(*(one(at) for at in range(start, start + 10)))

    asyncio.run(run())


def poll_jobs():
    import requests
    session = requests.Session()
    for _ in range(3):
        job = session.post("https://jobs.example/jobs", json={"script": DATA.prose(800)}, timeout=20).json()["job"]
        while session.get(f"https://jobs.example/jobs/{job}", timeout=20).json()["state"] != "done":
            time.sleep(0.05)


def heartbeat():
    import requests
    session = requests.Session()
    for at in range(60):
        session.post("https://jobs.example/workers/worker-7/heartbeat", timeout=20,
                     json={"at": time.time(), "load": DATA.random.random(), "step": at})
        time.sleep(0.1)


def registry_pull():
    import requests
    session = requests.Session()
    token = session.get("https://registry.example/token", params={
        "service": "registry.example", "scope": "repository:acme/app:pull"}, timeout=20).json()["token"]
    bearer = {"Authorization": "Bearer " + token}
    manifest = session.get("https://registry.example/v2/acme/app/manifests/latest", headers=bearer, timeout=20).json()
    for layer in manifest["layers"]:
        session.get(f"https://registry.example/v2/acme/app/blobs/{layer['digest']}", headers=bearer, timeout=20)


def signed_downloads():
    import requests
    session = requests.Session()
    for at in range(20):
        assert session.get(f"https://downloads.example/latest/{at}", timeout=20).content


def traced_calls():
    import requests
    session = requests.Session()
    for at in range(60):
        trace, span = DATA.pick(32, "0123456789abcdef"), DATA.pick(16, "0123456789abcdef")
        session.put(f"https://web.example/api/orders/{5000 + at}", json={"state": "paid", "note": DATA.prose(80)},
                    headers={"traceparent": f"00-{trace}-{span}-01", "Idempotency-Key": DATA.pick(36)}, timeout=20)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
