// Make every @huggingface/hub (npm) call that gpuwarden's users make, against the Hub at HF_ENDPOINT, and print each
// result. Usage: node clients_hub.mjs FOLDER-WITH-NODE_MODULES
import { pathToFileURL } from "node:url";

const hub = await import(pathToFileURL(`${process.argv[2]}/node_modules/@huggingface/hub/dist/index.mjs`));
const p = { hubUrl: process.env.HF_ENDPOINT, accessToken: process.env.HF_TOKEN };
const user = process.env.HF_USER;
const repo = { type: "model", name: `${user}/from-js` };
const bucket = { type: "bucket", name: `${user}/from-js` };
const mixed = new Uint8Array(400000).map((_, i) => Math.imul(i, 2654435761) >>> 13);
const same = new Uint8Array(300000).fill(7);
const given = {};

const all = (found) => Array.fromAsync ? Array.fromAsync(found) : (async () => {
  const rows = [];
  for await (const row of found) rows.push(row);
  return rows;
})();
const step = async (name, work) => {
  try {
    given[name] = (await work()) ?? "ok";
  } catch (error) {
    given[name] = `ERROR ${error.message}`;
  }
};
const text = async (blob) => (await blob).text();
const equal = async (blob, bytes) => Buffer.from(await (await blob).arrayBuffer()).equals(Buffer.from(bytes));
const files = [
  { path: "a/readme.md", content: new Blob(["hello js\n"]) },
  { path: "same.bin", content: new Blob([same]) },
];

await step("whoAmI", async () => (await hub.whoAmI(p)).name);
await step("createRepo", async () => (await hub.createRepo({ ...p, repo, visibility: "private" })).id.length);
await step("uploadFiles", async () => (await hub.uploadFiles({ ...p, repo, files })).commit.oid.length);
await step("listFiles", async () => (await all(hub.listFiles({ ...p, repo, recursive: true }))).map((f) => [f.path, f.size]));
await step("pathsInfo", async () => (await hub.pathsInfo({ ...p, repo, paths: ["a/readme.md"] }))[0].oid);
await step("downloadFile", () => text(hub.downloadFile({ ...p, repo, path: "a/readme.md" })));
await step("downloadXet", () => equal(hub.downloadFile({ ...p, repo, path: "same.bin" }), same));
await step("fileExists", () => hub.fileExists({ ...p, repo, path: "missing" }));
await step("fileDownloadInfo", async () => (await hub.fileDownloadInfo({ ...p, repo, path: "same.bin" })).size);
await step("modelInfo", async () => (await hub.modelInfo({ ...p, name: repo.name })).private);
await step("listModels", async () => (await all(hub.listModels({ ...p, search: { owner: user, query: "from-js" } }))).map((m) => m.name));
await step("listDatasets", async () => (await all(hub.listDatasets({ ...p, search: { owner: "trl-lib", query: "tldr" } }))).map((d) => d.name));
await step("datasetInfo", async () => (await hub.datasetInfo({ ...p, name: "trl-lib/Capybara" })).name);
await step("createBranch", () => hub.createBranch({ ...p, repo, branch: "b1" }));
await step("listCommits", async () => (await all(hub.listCommits({ ...p, repo }))).length);
await step("deleteFile", async () => (await hub.deleteFile({ ...p, repo, path: "a/readme.md" })).commit.oid.length);
await step("checkRepoAccess", () => hub.checkRepoAccess({ ...p, repo }));
await step("bucketCreate", async () => (await hub.createRepo({ ...p, repo: bucket, visibility: "private" })).id.length);
await step("bucketUpload", () => hub.uploadFiles({ ...p, repo: bucket, files: [{ path: "x/mixed.bin", content: new Blob([mixed]) }, ...files] }));
await step("bucketList", async () => (await all(hub.listFiles({ ...p, repo: bucket, recursive: true }))).map((f) => [f.path, f.size]));
await step("bucketDownload", () => equal(hub.downloadFile({ ...p, repo: bucket, path: "x/mixed.bin" }), mixed));
await step("bucketCopy", () => hub.copyFile({ ...p, source: { repo: bucket, path: "same.bin" }, destination: { repo: bucket, path: "copy.bin" } }));
await step("bucketCopyEqual", () => equal(hub.downloadFile({ ...p, repo: bucket, path: "copy.bin" }), same));
await step("bucketDeleteFile", () => hub.deleteFile({ ...p, repo: bucket, path: "same.bin" }));
await step("bucketDelete", () => hub.deleteRepo({ ...p, repo: bucket }));
await step("deleteRepo", () => hub.deleteRepo({ ...p, repo }));
await step("repoExists", () => hub.repoExists({ ...p, repo }));
console.log(JSON.stringify(given));
